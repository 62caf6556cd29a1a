"""A release of the chart under helm: nothing is half done, nothing touched without need, everything undone again."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.helm_chart import CHART, ChartRefused, Manifest, Values, pod_template, render, run_helm
from support.kubernetes_api import NAMESPACE, KubernetesApi

_OPERATORS = {
    "cert-manager.io/v1": ("Certificate",),
    "gateway.networking.k8s.io/v1": ("BackendTLSPolicy", "GRPCRoute", "HTTPRoute"),
    "monitoring.coreos.com/v1": ("PrometheusRule", "ServiceMonitor"),
}
# Another shape than that without values, in as many ways as there are.
_OTHER_SHAPE: Values = {
    "model": {"source": {"alias": None, "url": {"url": "https://models/m.gguf", "sha256": "0" * 64}}},
    "router": {"replicas": 4, "resources": {"limits": {"cpu": 2}}},
    "prefillPools": {
        "default": {"replicas": 2, "hugePages": {"amount": "4Gi"}},
        "small": {"autoscaling": {"enabled": True}},
    },
    "decodePools": {"default": None, "wide": {"config": {"memory": "2GiB"}, "rdma": {"resource": "rdma/hca"}}},
    "fusedPools": {"spare": {}},
    "tls": {"enabled": True, "certManager": {"issuerRef": {"name": "ca", "kind": "Issuer"}}},
    "tenants": {"secretName": "who"},
    "gateway": {
        "enabled": True,
        "parentRefs": [{"name": "public"}],
        "http": {"hostnames": ["llm.example"]},
        "grpc": {"hostnames": ["grpc.example"]},
        "authorityConfigMap": "authority",
    },
    "ingress": {"enabled": True, "host": "llm.example"},
    "metrics": {name: {"enabled": True} for name in ("serviceMonitor", "rules", "dashboard")},
    "extraEnv": [{"name": "NOTE", "value": "for all"}, {"name": "OMP_WAIT_POLICY", "value": "ACTIVE"}],
    "poolDefaults": {"extraEnv": [{"name": "NOTE", "value": "for pools"}]},
    "podAnnotations": {"note": "1"},
    "serviceAccount": {"create": False},
}
_APPLIED = "--server-side=true"
_PATCHED_BY_CLIENT = "--server-side=false"
_ROUTERS = ("Deployment", "mesh-pdmesh-router")
_ADDRESSES_OF_ROUTERS = ("ConfigMap", "mesh-pdmesh-router")


class Release:
    """The release `mesh` of the chart on one API server. Everything raises ChartRefused, with what helm says."""

    def __init__(self, api: KubernetesApi) -> None:
        self.api = api

    def put(self, values: Values, *options: str, chart: Path = CHART) -> None:
        """Installs it or makes it another one."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(values, file)
            file.flush()
            # The server publishes no OpenAPI document, and sees to every object itself.
            always = ("--install", "--reset-values", "--disable-openapi-validation")
            self._helm("upgrade", "mesh", str(chart), "-f", file.name, *always, *options)

    def roll_back(self, revision: int, *options: str) -> None:
        self._helm("rollback", "mesh", str(revision), *options)

    def remove(self) -> None:
        self._helm("uninstall", "mesh")

    def history(self) -> list[str]:
        """The state of every revision, oldest first."""
        return [revision["status"] for revision in json.loads(self._helm("history", "mesh", "-o", "json"))]

    def _helm(self, command: str, *arguments: str) -> str:
        where = ("--kube-apiserver", self.api.address, "--kubeconfig", os.devnull, "--namespace", NAMESPACE)
        return run_helm(command, *arguments, *where)


@pytest.fixture
def release() -> Iterator[Release]:
    with KubernetesApi(_OPERATORS) as api:
        yield Release(api)


def _rendered(values: Values) -> dict[tuple[str, str], Manifest]:
    """The objects of a release by kind and name, with the marks of helm and without the pod of `helm test`."""
    marks = {"meta.helm.sh/release-name": "mesh", "meta.helm.sh/release-namespace": NAMESPACE}
    objects = {}
    for manifest in render(values):
        metadata = manifest["metadata"]
        if "helm.sh/hook" not in metadata.get("annotations", {}):
            metadata["annotations"] = metadata.get("annotations", {}) | marks
            objects[manifest["kind"], metadata["name"]] = manifest
    return objects


def _pool(role: str, name: str) -> set[tuple[str, str]]:
    kinds = ("ConfigMap", "PodDisruptionBudget", "Service", "StatefulSet")
    return {(kind, f"mesh-pdmesh-{role}-{name}") for kind in kinds}


@pytest.mark.parametrize("way", [_APPLIED, _PATCHED_BY_CLIENT])
def test_a_release_takes_another_shape_and_the_former_one_again_and_leaves_nothing(release: Release, way: str) -> None:
    release.put({}, way)
    first = release.api.objects()
    assert first == _rendered({})
    release.put(_OTHER_SHAPE, way)
    assert release.api.objects() == _rendered(_OTHER_SHAPE)
    release.roll_back(1, way)
    assert release.api.objects() == first
    assert release.history() == ["superseded", "superseded", "deployed"]
    release.remove()
    assert release.api.num_stored() == 0


def test_an_upgrade_touches_what_it_is_about_alone(release: Release) -> None:
    values: dict[str, dict[str, object]] = {}
    release.put(values)
    for change, touched in (
        ({"router": {"replicas": 3}}, {_ROUTERS}),
        # Decode nodes read of a new prefill node whenever they start next; nothing restarts them for it.
        (
            {"prefillPools": {"default": {"replicas": 2}}},
            {
                *(_ROUTERS, _ADDRESSES_OF_ROUTERS, ("ConfigMap", "mesh-pdmesh-decode-default")),
                ("StatefulSet", "mesh-pdmesh-prefill-default"),
            },
        ),
        ({"decodePools": {"wide": {}}}, {_ROUTERS, _ADDRESSES_OF_ROUTERS, *_pool("decode", "wide")}),
    ):
        before = release.api.objects()
        values |= change
        release.put(values)
        assert release.api.changes(before) == touched
        pods_before, pods = (pod_template(objects[_ROUTERS]) for objects in (before, release.api.objects()))
        assert (pods_before != pods) == (_ADDRESSES_OF_ROUTERS in touched)
    prefill = before["StatefulSet", "mesh-pdmesh-prefill-default"]
    assert prefill["spec"]["replicas"] == 2
    assert pod_template(prefill) == pod_template(_rendered({})["StatefulSet", "mesh-pdmesh-prefill-default"])


def test_another_version_of_the_chart_that_makes_the_same_pods_replaces_none(release: Release, tmp_path: Path) -> None:
    release.put({})
    before = release.api.objects()
    newer = shutil.copytree(CHART, tmp_path / "pdmesh")
    facts = newer / "Chart.yaml"
    facts.write_text(
        re.sub(r"(?m)^version: .*", "version: 99.0.0", facts.read_text(encoding="utf-8")), encoding="utf-8"
    )
    release.put({}, chart=newer)
    after = release.api.objects()
    assert release.api.changes(before) == before.keys()
    for key in (_ROUTERS, *(("StatefulSet", f"mesh-pdmesh-{role}-default") for role in ("prefill", "decode"))):
        assert after[key]["metadata"]["labels"]["helm.sh/chart"] == "pdmesh-99.0.0"
        assert after[key]["spec"] == before[key]["spec"]


def test_an_upgrade_leaves_the_size_to_the_autoscaler_and_does_not_undo_what_was_done_by_hand(release: Release) -> None:
    values = {"prefillPools": {"default": {"autoscaling": {"enabled": True}}}}
    release.put(values)
    release.api.scale("mesh-pdmesh-prefill-default", 3)
    before = release.api.objects()
    release.put(values | {"router": {"replicas": 3}})
    assert release.api.changes(before) == {_ROUTERS}
    release.api.scale("mesh-pdmesh-decode-default", 5)
    with pytest.raises(ChartRefused, match=r"mesh-pdmesh-decode-default.*conflict.*\.spec\.replicas"):
        release.put(values)
    release.put(values | {"decodePools": {"default": {"replicas": 5}}})
    sizes = [
        release.api.objects()["StatefulSet", f"mesh-pdmesh-{role}-default"]["spec"]["replicas"]
        for role in ("prefill", "decode")
    ]
    assert sizes == [3, 5]


def test_what_a_variable_is_set_to_last_holds(release: Release) -> None:
    release.put(_OTHER_SHAPE)
    objects = release.api.objects()
    for key, note, policy in (
        (("StatefulSet", "mesh-pdmesh-decode-wide"), "for pools", "ACTIVE"),
        (_ROUTERS, "for all", "ACTIVE"),
    ):
        (container,) = pod_template(objects[key])["spec"]["containers"]
        entries = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert (entries["NOTE"], entries["OMP_WAIT_POLICY"]) == (note, policy)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"router": {"replcas": 3}}, "replcas"),
        ({"ingress": {"enabled": True, "host": "llm.example"}, "router": {"http": False}}, "set router.http"),
    ],
)
def test_values_that_the_chart_refuses_make_nothing(release: Release, values: Values, words: str) -> None:
    with pytest.raises(ChartRefused, match=words):
        release.put(values)
    assert release.api.num_stored() == 0


def test_a_rehearsal_makes_nothing(release: Release) -> None:
    release.put(_OTHER_SHAPE, "--dry-run=server")
    assert release.api.num_stored() == 0


def test_where_an_operator_is_missing_its_kind_is_named_and_nothing_is_made() -> None:
    with KubernetesApi() as api:
        with pytest.raises(ChartRefused, match='no matches for kind "Certificate"'):
            Release(api).put(_OTHER_SHAPE)
        assert api.num_stored() == 0


@pytest.mark.parametrize(
    ("decode_pool", "words"),
    [
        ({"scheduling": {"affinity": {"podAntiAfinity": {}}}}, "podAntiAfinity"),
        (
            {"resources": {"requests": {"example/card": 1}, "limits": {"example/card": 2}}},
            "example/card must be equal to its limit",
        ),
    ],
)
def test_an_object_that_kubernetes_refuses_is_reported_and_the_release_mended_by_the_next(
    release: Release, decode_pool: Values, words: str
) -> None:
    with pytest.raises(ChartRefused, match=f'StatefulSet "mesh-pdmesh-decode-default" is invalid: .*{words}'):
        release.put({"decodePools": {"default": decode_pool}})
    assert release.history() == ["failed"]
    assert ("StatefulSet", "mesh-pdmesh-decode-default") not in release.api.objects()
    release.put({"router": {"replicas": 1}})
    assert release.api.objects() == _rendered({"router": {"replicas": 1}})
    assert release.history() == ["superseded", "deployed"]


def test_a_change_that_kubernetes_does_not_allow_keeps_every_pod_and_can_be_rolled_back(release: Release) -> None:
    values = {"fullnameOverride": "llm"}
    release.put(values)
    before = release.api.objects()
    # The name is in the selectors.
    with pytest.raises(ChartRefused, match=re.escape('"llm-router" is invalid: spec.selector: Forbidden')):
        release.put(values | {"nameOverride": "other"})
    assert release.history() == ["deployed", "failed"]
    assert {kind for kind, _ in release.api.changes(before)}.isdisjoint({"Deployment", "StatefulSet"})
    release.roll_back(1)
    assert release.api.objects() == before
