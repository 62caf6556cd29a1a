// Of the objects on its input, a list in JSON, says which the schemas of the Gateway API do not allow: `KIND: why`, a line each.
// Usage: node gateway_api.mjs FOLDER, with the package @kubernetes-models/gateway-api in FOLDER/node_modules.
import { readFileSync } from "node:fs";

const [folder] = process.argv.slice(2);
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  const models = await import(`${folder}/node_modules/@kubernetes-models/gateway-api/${object.apiVersion}/${object.kind}.js`);
  try {
    new models[object.kind](object).validate();
  } catch (error) {
    console.log(`${object.kind}: ${error.message}`);
  }
}
