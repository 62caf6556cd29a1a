"""What Kubernetes refuses of an object, and how a patch changes one, by the schemas of `kubernetes_validate`.

Knows no server. Of what a real one refuses beyond its schemas it knows names, labels, selectors that miss their own
pods, volumes that are not there, resources asked for beyond their limit, elements of a list that share a key, and
fields that cannot be changed; nothing of defaults, quotas, admission, and of what objects say of one another.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from google.protobuf import descriptor_pb2, json_format, message_factory
from grpc_tools import protoc

from support.helm_chart import Manifest, module_or_skip, selects

kubernetes_validate = module_or_skip("kubernetes_validate")
KUBERNETES_VERSION = "1.37"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?")
# Of the spec of a StatefulSet all but these are fixed; of other kinds nothing but what is named here.
_STATEFUL_SET_MAY_CHANGE = {
    *("replicas", "ordinals", "template", "updateStrategy", "minReadySeconds", "revisionHistoryLimit"),
    "persistentVolumeClaimRetentionPolicy",
}
_FIXED = {"Deployment": {"selector"}, "Service": {"clusterIP"}}
_MAGIC = b"k8s\0"
# What helm sends as protobuf: its releases. Field numbers are those of the Kubernetes API, of which most are left out.
_PROTO = """
syntax = "proto2";
message TypeMeta { optional string apiVersion = 1; optional string kind = 2; }
message Unknown { optional TypeMeta typeMeta = 1; optional bytes raw = 2; }
message ObjectMeta {
  optional string name = 1;
  optional string namespace = 3;
  optional string resourceVersion = 6;
  map<string, string> labels = 11;
  map<string, string> annotations = 12;
}
message Secret { optional ObjectMeta metadata = 1; map<string, bytes> data = 2; optional string type = 3; }
"""


def fault(manifest: Manifest, former: Manifest | None = None) -> str | None:
    """Why Kubernetes would not take the object, in place of `former` where there is one. None: it would."""
    metadata = manifest.get("metadata", {})
    if not _NAME.fullmatch(metadata.get("name", "")):
        return f"metadata.name: Invalid value: {metadata.get('name')!r}"
    wrong = _schema_fault(json.dumps(manifest, sort_keys=True))
    if wrong:
        return wrong
    spec, before = manifest.get("spec", {}), (former or manifest).get("spec", {})
    pod_labels = spec["template"]["metadata"]["labels"] if "template" in spec else {}
    for label, value in [*metadata.get("labels", {}).items(), *pod_labels.items()]:
        if not _LABEL_VALUE.fullmatch(value):
            return f"labels: Invalid value: {label}: {value}"
    if "template" in spec:
        if not selects(spec["selector"], pod_labels):
            return "spec.template.metadata.labels: Invalid value: `selector` does not match template `labels`"
        wrong = next(_pod_faults(spec["template"]["spec"]), None)
        if wrong:
            return f"spec.template.spec.{wrong}"
    changed = {name for name in spec.keys() | before.keys() if spec.get(name) != before.get(name)}
    kind = manifest["kind"]
    fixed = changed - _STATEFUL_SET_MAY_CHANGE if kind == "StatefulSet" else changed & _FIXED.get(kind, set())
    return f"spec.{min(fixed)}: Forbidden: field is immutable" if fixed else None


def _pod_faults(pod: Manifest) -> Iterator[str]:
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in volumes:
                yield f"{container['name']}.volumeMounts: Not found: {mount['name']}"
        resources = container.get("resources", {})
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        for name in requests.keys() & limits.keys():
            if _amount(requests[name]) > _amount(limits[name]):
                yield f"{container['name']}.resources.requests: {name} must be less than or equal to its limit"
        for name in requests.keys() | limits.keys():
            # What cannot be shared is given or not.
            if ("/" in name or name.startswith("hugepages-")) and requests.get(name) != limits.get(name):
                yield f"{container['name']}.resources.requests: {name} must be equal to its limit"


def _amount(quantity: str | float) -> Decimal:
    number, unit = re.fullmatch(r"([0-9.]+)(m|[kMGTP]?|[KMGTP]i)", str(quantity)).groups()
    if unit == "m":
        return Decimal(number) / 1000
    base = 1024 if unit.endswith("i") else 1000
    return Decimal(number) * base ** " kMGTP".index(unit.removesuffix("i").replace("K", "k") or " ")


@functools.cache
def _schema_fault(text: str) -> str | None:
    manifest = json.loads(text)
    try:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError:
        # Of a custom kind, whose schema its owner would have brought.
        return None
    return next(_duplicates(manifest, Shape.of(manifest), ""), None)


def _duplicates(value: object, shape: Shape, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _duplicates(inner, shape.field(name), f"{path}.{name}")
    elif isinstance(value, list):
        names = [tuple(inner.get(key) for key in shape.keys) for inner in value if shape.keys]
        for name in names:
            if names.count(name) > 1:
                yield f"{path}: duplicate entries for key {dict(zip(shape.keys, name, strict=True))}"
        for index, inner in enumerate(value):
            yield from _duplicates(inner, shape.element, f"{path}[{index}]")


@dataclass(frozen=True, slots=True)
class Shape:
    """The schema of a value inside an object. That of an unknown value knows nothing."""

    schema: Mapping[str, object]

    @classmethod
    def of(cls, manifest: Manifest) -> Shape:
        group, _, version = manifest["apiVersion"].rpartition("/")
        for schema in _definitions().values():
            for known in schema.get("x-kubernetes-group-version-kind", ()):
                if known == {"group": group, "version": version, "kind": manifest["kind"]}:
                    return cls(schema)
        return cls({})

    def field(self, name: str) -> Shape:
        return self._inner(self.schema.get("properties", {}).get(name, {}))

    @property
    def element(self) -> Shape:
        return self._inner(self.schema.get("items", {}))

    @property
    def keys(self) -> tuple[str, ...]:
        """By which server-side apply tells the elements of a list apart; empty for a list that is one value."""
        return tuple(self.schema.get("x-kubernetes-list-map-keys", ()))

    @property
    def patch_key(self) -> str | None:
        """Likewise for a strategic merge patch."""
        return self.schema.get("x-kubernetes-patch-merge-key")

    @staticmethod
    def _inner(schema: Mapping[str, object]) -> Shape:
        target = schema.get("$ref", "").rpartition("/")[2]
        return Shape(_definitions().get(target, schema))


@functools.cache
def _definitions() -> Mapping[str, Mapping[str, object]]:
    folder = (
        Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{KUBERNETES_VERSION}.0-local-strict"
    )
    return json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))["$defs"]


def merge_patch(current: object, patch: object) -> object:
    """Source: RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(current) if isinstance(current, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def strategic_patch(current: Manifest, patch: Manifest, shape: Shape) -> Manifest:
    """A merge patch that changes single elements of the lists of which the schema names a key.

    Lists of plain values that are merged are not: helm sends none of the chart's objects.
    """
    merged = dict(current)
    for name, value in patch.items():
        key = shape.field(name).patch_key
        if name.startswith("$setElementOrder/"):
            continue
        assert not name.startswith("$deleteFromPrimitiveList"), name
        if name == "$retainKeys":
            merged = {kept: inner for kept, inner in merged.items() if kept in value}
        elif value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            merged[name] = strategic_patch(merged.get(name, {}), value, shape.field(name))
        elif isinstance(value, list) and key:
            order = [entry[key] for entry in patch.get(f"$setElementOrder/{name}", ())]
            merged[name] = _patched_list(merged.get(name, []), value, key, order, shape.field(name).element)
        else:
            merged[name] = value
    return merged


def _patched_list(
    current: list[Manifest], patch: list[Manifest], key: str, order: list[object], shape: Shape
) -> list[Manifest]:
    elements = {element[key]: element for element in current}
    for change in patch:
        if change.get("$patch") == "delete":
            elements.pop(change[key], None)
        else:
            elements[change[key]] = strategic_patch(elements.get(change[key], {}), change, shape)
    return [elements.pop(name) for name in order if name in elements] + list(elements.values())


def apply(current: Manifest, before: Manifest, wanted: Manifest, path: str = "") -> tuple[Manifest, list[str]]:
    """Server-side apply, with every list as one value: the object, and the fields that somebody else has changed.

    before: what the same manager applied last; fields that it no longer names are taken away.
    """
    merged, conflicts = dict(current), []
    for name in [*wanted, *(name for name in before if name not in wanted)]:
        held, old, new = current.get(name), before.get(name), wanted.get(name)
        if isinstance(held, dict) and isinstance(new if name in wanted else old, dict):
            merged[name], inner = apply(held, old if isinstance(old, dict) else {}, new or {}, f"{path}.{name}")
            conflicts += inner
            if name not in wanted and not merged[name]:
                del merged[name]
        elif name in wanted:
            if name in current and held not in (old, new):
                conflicts.append(f"{path}.{name}")
            merged[name] = new
        elif held == old:
            merged.pop(name, None)
    return merged, conflicts


def decoded(body: bytes) -> Manifest:
    """An object from its protobuf form, in which clients send what their language has a type for."""
    messages = _messages()
    envelope = messages["Unknown"].FromString(body.removeprefix(_MAGIC))
    kind = envelope.typeMeta.kind
    content = json_format.MessageToDict(messages[kind].FromString(envelope.raw))
    return {"apiVersion": envelope.typeMeta.apiVersion, "kind": kind, **content}


def is_protobuf(body: bytes) -> bool:
    return body.startswith(_MAGIC)


@functools.cache
def _messages() -> Mapping[str, type]:
    with tempfile.TemporaryDirectory() as directory:
        source, compiled = Path(directory) / "kubernetes.proto", Path(directory) / "kubernetes.binpb"
        source.write_text(_PROTO, encoding="utf-8")
        assert protoc.main(["protoc", f"-I{directory}", f"--descriptor_set_out={compiled}", str(source)]) == 0
        files = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
    return message_factory.GetMessages(files.file)
