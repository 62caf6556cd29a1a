"""An API server of Kubernetes in this process, as much of one as `helm` needs for the life of a release.

It keeps the objects of one namespace, merges what is applied to them and refuses what `kubernetes_objects` knows that
Kubernetes refuses. It is not Kubernetes: no controllers, so no pod ever runs and nothing becomes ready; no defaults,
admission, rights, watches, quotas or garbage collection, and no OpenAPI document. What a release does to objects can be
seen here; what these would do in a cluster cannot.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qsl, urlsplit

from support.helm_chart import Manifest
from support.kubernetes_objects import (
    KUBERNETES_VERSION,
    Shape,
    apply,
    decoded,
    fault,
    is_protobuf,
    merge_patch,
    strategic_patch,
)

NAMESPACE = "serving"
_BUILT_IN = {
    "v1": ("ConfigMap", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "networking.k8s.io/v1": ("Ingress", "NetworkPolicy"),
    "policy/v1": ("PodDisruptionBudget",),
}
_SET_BY_SERVER = ("namespace", "uid", "resourceVersion", "creationTimestamp")
_VERBS = ("create", "delete", "get", "list", "patch", "update")
_COLLECTION = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))/namespaces/(?P<namespace>[^/]+)/(?P<plural>[a-z]+)"
)
_REQUIREMENT = re.compile(r"([^=!]+)(=|==|!=)([^=!]*)")


class Refused(Exception):
    """An answer that is not the one that was wanted: status code, reason, message."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    verb: str
    path: str
    query: Mapping[str, str]
    content_type: str
    body: Manifest


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What is different for every object of the one namespace that there is."""

    plural: str
    name: str


class KubernetesApi:
    """Serves while it is entered. `custom` names the kinds of operators that are installed, by their API version."""

    def __init__(self, custom: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._kinds = {**_BUILT_IN, **(custom or {})}
        self._lock = threading.Lock()
        self._objects: dict[Key, Manifest] = {}
        self._applied: dict[tuple[Key, str], Manifest] = {}
        self._last_version = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *arguments: _Connection(self, *arguments))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> KubernetesApi:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def objects(self) -> dict[tuple[str, str], Manifest]:
        """By kind and name, as clients declared them: without what the server adds, and without what helm remembers."""
        with self._lock:
            kept = [_declared(each) for each in self._objects.values()]
        return {
            (each["kind"], each["metadata"]["name"]): each for each in kept if each.get("type") != "helm.sh/release.v1"
        }

    def changes(self, before: Mapping[tuple[str, str], Manifest]) -> set[tuple[str, str]]:
        """What was made, changed or removed since `objects` gave `before`."""
        now = self.objects()
        return {key for key in now.keys() | before.keys() if now.get(key) != before.get(key)}

    def num_stored(self) -> int:
        """Of objects of every kind, the memory of helm among them."""
        with self._lock:
            return len(self._objects)

    def scale(self, stateful_set: str, num_replicas: int) -> None:
        """As an autoscaler does it, or somebody by hand."""
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets/{stateful_set}"
        patch = {"spec": {"replicas": num_replicas}}
        self.answer(Request(verb="PATCH", path=path, query={}, content_type="application/merge-patch+json", body=patch))

    def answer(self, request: Request) -> tuple[int, object]:
        """Status code and body."""
        try:
            with self._lock:
                return self._discovery(request.path) or self._of_collection(request)
        except Refused as refusal:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}}
            return refusal.code, {**status, "code": refusal.code, "reason": refusal.reason, "message": str(refusal)}

    def _discovery(self, path: str) -> tuple[int, object] | None:
        groups = [version for version in self._kinds if "/" in version]
        if path == "/version":
            major, minor = KUBERNETES_VERSION.split(".")
            return 200, {"major": major, "minor": minor, "gitVersion": f"v{KUBERNETES_VERSION}.0"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            versions = [{"groupVersion": each, "version": each.split("/")[1]} for each in groups]
            listed = [
                {"name": each["groupVersion"].split("/")[0], "versions": [each], "preferredVersion": each}
                for each in versions
            ]
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version not in self._kinds:
            return None
        resources = [
            {"name": _plural(kind), "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": _VERBS}
            for kind in self._kinds[version]
        ]
        return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}

    def _of_collection(self, request: Request) -> tuple[int, object]:
        match = _COLLECTION.match(request.path)
        plural = match["plural"] if match else ""
        version = (match["core"] or match["group"]) if match else ""
        kind = next((kind for kind in self._kinds.get(version, ()) if _plural(kind) == plural), None)
        if match is None or kind is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if match["namespace"] != NAMESPACE:
            raise Refused(404, "NotFound", f'namespaces "{match["namespace"]}" not found')
        name = request.path[match.end() :].removeprefix("/")
        if request.verb == "GET" and not name:
            return 200, self._listed(version, kind, request.query)
        if request.verb == "POST":
            return 201, self._created(Key(plural, request.body["metadata"]["name"]), request)
        key = Key(plural, name)
        applies = request.verb == "PATCH" and request.content_type == "application/apply-patch+yaml"
        if key not in self._objects and not applies:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found')
        if request.verb == "GET":
            return 200, self._objects[key]
        if request.verb == "DELETE":
            return 200, self._removed(key, request)
        if applies:
            return 200 if key in self._objects else 201, self._apply(key, request)
        return 200, self._changed(key, request)

    def _listed(self, version: str, kind: str, query: Mapping[str, str]) -> Manifest:
        chosen = [each for key, each in sorted(self._objects.items()) if key.plural == _plural(kind)]
        for term in filter(None, query.get("labelSelector", "").split(",")):
            match = _REQUIREMENT.fullmatch(term)
            if match is None:
                raise Refused(400, "BadRequest", f"unable to parse requirement: {term}")
            label, operator, value = match.groups()
            chosen = [each for each in chosen if (_labels(each).get(label) == value) == (operator != "!=")]
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": chosen}

    def _created(self, key: Key, request: Request) -> Manifest:
        if key in self._objects:
            raise Refused(409, "AlreadyExists", f'{key.plural} "{key.name}" already exists')
        return self._kept(key, request.body, request)

    def _changed(self, key: Key, request: Request) -> Manifest:
        current = self._objects[key]
        if request.verb == "PUT":
            return self._kept(key, request.body, request)
        if request.content_type == "application/merge-patch+json":
            return self._kept(key, merge_patch(current, request.body), request)
        shape = Shape.of(current)
        if request.content_type == "application/strategic-merge-patch+json" and shape.schema:
            return self._kept(key, strategic_patch(current, request.body, shape), request)
        raise Refused(415, "UnsupportedMediaType", f"{request.verb} of {request.content_type}")

    def _apply(self, key: Key, request: Request) -> Manifest:
        manager = request.query["fieldManager"]
        before = self._applied.get((key, manager), {})
        merged, conflicts = apply(self._objects.get(key, {}), before, request.body)
        if conflicts and request.query.get("force") != "true":
            raise Refused(409, "Conflict", f"Apply failed with {len(conflicts)} conflicts: {', '.join(conflicts)}")
        kept = self._kept(key, merged, request)
        if "dryRun" not in request.query:
            self._applied[key, manager] = request.body
        return kept

    def _removed(self, key: Key, request: Request) -> Manifest:
        removed = self._objects[key]
        if "dryRun" not in request.query:
            del self._objects[key]
            self._applied = {held: body for held, body in self._applied.items() if held[0] != key}
        details = {"name": key.name, "kind": key.plural, "uid": removed["metadata"]["uid"]}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _kept(self, key: Key, wanted: Manifest, request: Request) -> Manifest:
        """The object as it is stored. One that changes nothing keeps its version."""
        former = self._objects.get(key)
        held = former["metadata"] if former else {"uid": str(uuid.uuid4()), "creationTimestamp": "2026-01-01T00:00:00Z"}
        expected = wanted["metadata"].get("resourceVersion")
        if expected and expected != held.get("resourceVersion"):
            raise Refused(409, "Conflict", f'{key.plural} "{key.name}": the object has been modified')
        declared = _declared(wanted)
        wrong = fault(declared, former)
        if wrong:
            raise Refused(422, "Invalid", f'{declared["kind"]} "{key.name}" is invalid: {wrong}')
        if former and declared == _declared(former):
            return former
        self._last_version += 1
        added = {"namespace": NAMESPACE, "resourceVersion": str(self._last_version)}
        added |= {name: held[name] for name in ("uid", "creationTimestamp")}
        stored = declared | {"metadata": declared["metadata"] | added}
        if "dryRun" not in request.query:
            self._objects[key] = stored
        return stored


def _declared(manifest: Manifest) -> Manifest:
    """A copy without what the server adds."""
    declared = copy.deepcopy(manifest)
    declared["metadata"] = {name: value for name, value in declared["metadata"].items() if name not in _SET_BY_SERVER}
    return declared


def _plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}es" if name.endswith("s") else f"{name}s"


def _labels(manifest: Manifest) -> Mapping[str, str]:
    return manifest["metadata"].get("labels", {})


class _Connection(BaseHTTPRequestHandler):
    """HTTP, of which the server knows nothing."""

    protocol_version = "HTTP/1.1"
    # An answer leaves in one piece: the second of two would wait for the first to be acknowledged.
    wbufsize = -1

    def __init__(self, api: KubernetesApi, *arguments: object) -> None:
        self._api = api
        super().__init__(*arguments)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: what was asked can be seen from the objects."""

    def _serve(self) -> None:
        address = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(
            verb=self.command,
            path=address.path.rstrip("/"),
            query=dict(parse_qsl(address.query)),
            content_type=(self.headers.get("Content-Type") or "").split(";")[0],
            # What deletes says how, in a form of its own, and all of it is the same here.
            body={} if self.command == "DELETE" else decoded(body) if is_protobuf(body) else json.loads(body or b"{}"),
        )
        code, content = self._api.answer(request)
        answer = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815
