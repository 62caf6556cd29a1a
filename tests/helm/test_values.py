"""Values that the chart refuses, and its schema in step with the options that the roles have."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping

import pytest
import yaml
from support.helm_chart import CHART, ChartRefused, render

from node_runtime.config_sources import ROLE_KEY
from pdmesh_cli.config_commands import ROLE_CONFIGS, file_schema

_SCHEMA_FILE = CHART / "values.schema.json"
# What the chart decides itself, from other values.
_NOT_FOR_USERS = {
    ROLE_KEY,
    *(
        "node_id",
        "host",
        "port",
        "advertise_host",
        "metrics_port",
        "model",
        "served_model_name",
        "otlp_endpoint",
        "device",
    ),
    *("prefill", "decode", "fused", "data_plane_port"),
    *("data_plane_tls_cert", "data_plane_tls_key", "data_plane_tls_ca"),
    *("tls_cert", "tls_key", "tls_ca", "tls_domain", "health_port", "client_certificates", "tenants", "http"),
}
_NO_POOL = {"prefillPools": {"default": None}, "decodePools": {"default": None}}
_CPU_METRIC = {
    "type": "Resource",
    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
}


_SECRETS = {role: f"given-{role}" for role in ("router", "prefill", "decode", "operator")}


def _gateway(**changes: Mapping[str, object]) -> dict[str, object]:
    """Values with routes of the Gateway API, of which `http` and `grpc` have these changes."""
    own = {kind: {"hostnames": [f"{kind}.example"], **changes.get(kind, {})} for kind in ("http", "grpc")}
    return {"gateway": {"enabled": True, "parentRefs": [{"name": "public"}], **own}}


def _config_definition(role: str) -> dict[str, object]:
    """The schema of `config` in the values: that of a file, without what the chart decides and without the words."""
    properties = {
        name: {key: value for key, value in fact.items() if key not in ("title", "description")}
        for name, fact in file_schema(role)["properties"].items()  # type: ignore[attr-defined]
        if name not in _NOT_FOR_USERS
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def test_the_schema_knows_the_options_of_every_role() -> None:
    """PDMESH_UPDATE_GOLDEN=1 writes them anew."""
    schema = json.loads(_SCHEMA_FILE.read_text(encoding="utf-8"))
    wanted = copy.deepcopy(schema)
    wanted["definitions"].update({f"{role}Config": _config_definition(role) for role in ROLE_CONFIGS})
    if os.environ.get("PDMESH_UPDATE_GOLDEN"):
        _SCHEMA_FILE.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    assert wanted == schema or os.environ.get("PDMESH_UPDATE_GOLDEN")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        # Shapes that could answer nobody.
        ({"decodePools": {"default": None}}, "decodePools"),
        (_NO_POOL, "decodePools|fusedPools"),
        ({"prefillPools": {"default": None}}, "prefillPools"),
        ({"router": {"replicas": 0}}, "router/replicas"),
        ({"decodePools": {"default": {"replicas": 0}}}, "decodePools/default/replicas"),
        # Values that no node would take.
        ({"decodePools": {"default": {"config": {"memroy": "1GiB"}}}}, "memroy"),
        ({"decodePools": {"default": {"config": {"memory": "lots"}}}}, "decodePools/default/config/memory"),
        ({"prefillPools": {"default": {"config": {"local_prefill": "fallback"}}}}, "local_prefill"),
        ({"prefillPools": {"default": {"config": {"port": 1}}}}, "port"),
        ({"router": {"config": {"max_attempts": 0}}}, "router/config/max_attempts"),
        ({"prefillPools": {"default": {"config": {"tensor_parallel": 65}}}}, "tensor_parallel"),
        # Values that Kubernetes would not, or would take and not do.
        ({"prefillPools": {"default": {"gpus": 1}}}, "prefillPools/default/gpus"),
        ({"prefillPools": {"Large": {}}}, "Large"),
        ({"ports": {"grpc": 0}}, "ports/grpc"),
        ({"prefilPools": {}}, "prefilPools"),
        ({"networkPolicy": {"clients": []}}, "networkPolicy/clients"),
        ({"fusedPools": {"a": {"autoscaling": {"metrics": []}}}}, "fusedPools/a/autoscaling/metrics"),
        ({"model": {"source": {"pvc": {"claimName": "c", "path": "m"}}}}, "model/source"),
        ({"model": {"source": {"alias": None}}}, "model/source"),
        ({"model": {"source": {"alias": None, "url": {"url": "https://h/m"}}}}, "sha256"),
        ({"image": {"digest": "latest"}}, "image/digest"),
        ({"router": {"resources": {"limits": {"memory": "lots"}}}}, "router/resources/limits/memory"),
        # What only both sides of a comparison tell.
        (
            {
                "prefillPools": {"default": {"config": {"tensor_parallel": 2}}},
                "decodePools": {"default": {"config": {"tensor_parallel": 3}}},
            },
            r"prefillPools\.default\.config\.tensor_parallel=2 and decodePools\.default\.config\.tensor_parallel=3",
        ),
        (
            {"decodePools": {"default": {"config": {"dtype": "bfloat16"}}}},
            r"prefillPools\.default\.config\.dtype=\(default\) and decodePools\.default\.config\.dtype=bfloat16",
        ),
        (
            {"prefillPools": {"default": {"resources": {"limits": {"memory": "2500Mi"}}}}},
            r"prefillPools\.default\.resources: limits\.memory=2500Mi is below requests\.memory=3Gi",
        ),
        (
            {"router": {"resources": {"requests": {"cpu": 1.5}, "limits": {"cpu": "1400m"}}}},
            r"router\.resources: limits\.cpu=1400m is below requests\.cpu=1\.5",
        ),
        (
            {"decodePools": {"default": {"config": {"memory": "3.5 gib"}}}},
            r"decodePools\.default: config\.memory=3\.5 gib, the arena, exceeds resources\.limits\.memory=3Gi",
        ),
        (
            {"poolDefaults": {"config": {"memory": 2**32}, "resources": {"limits": {"memory": "4e9"}}}},
            r"config\.memory=4\.294967296e\+09, the arena, exceeds resources\.limits\.memory=4e9",
        ),
        ({"ports": {"http": 7700}}, r"ports\.grpc and ports\.http: both are 7700"),
        ({"ports": {"dataPlane": 7720}}, r"ports\.metrics and ports\.dataPlane: both are 7720"),
        ({"ports": {"health": 7700}, "tls": {"enabled": True, "secrets": _SECRETS}}, r"ports\.grpc and ports\.health"),
        ({"poolDefaults": {"gpus": 1}}, r"decodePools\.default\.gpus: 1 given|prefillPools\.default\.gpus: 1 given"),
        ({"fusedPools": {"a": {"gpus": 1, "config": {"tensor_parallel": 2}}}}, "tensor ranks compute on CPUs"),
        # Routes that would lead nowhere.
        ({"ingress": {"enabled": True}}, "ingress/host"),
        ({"ingress": {"enabled": True, "host": "a.b"}, "router": {"http": False}}, r"set router\.http"),
        ({"ingress": {"enabled": True, "host": "a.b", "paths": ["v1"]}}, "ingress/paths/0"),
        ({"gateway": {"enabled": True}}, "gateway/parentRefs"),
        (_gateway(http={"enabled": False}, grpc={"enabled": False}), "gateway"),
        (_gateway(http={"hostnames": []}), r"gateway\.http\.hostnames: none given"),
        (_gateway(grpc={"hostnames": ["http.example"]}), r"http\.example is among the host names of both"),
        (_gateway() | {"tls": {"enabled": True, "secrets": _SECRETS}}, r"gateway\.authorityConfigMap: none given"),
        (
            _gateway() | {"tls": {"enabled": True, "secrets": _SECRETS, "clientCertificates": True}},
            r"tls\.clientCertificates: true",
        ),
        ({"tls": {"enabled": True}}, r"tls: give secrets\.operator, or certManager\.issuerRef"),
        (
            {
                "fusedPools": {
                    "a": {
                        "autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 2, "metrics": [_CPU_METRIC]}
                    }
                }
            },
            "minReplicas=3 must not exceed maxReplicas=2",
        ),
        (
            {"fullnameOverride": "a" * 40, "prefillPools": {"bbbbbbbbbb": {}}},
            "give the release or the pool a shorter name",
        ),
    ],
)
def test_values_that_make_no_mesh_are_refused_by_name(values: Mapping[str, object], complaint: str) -> None:
    with pytest.raises(ChartRefused) as refusal:
        render(values)
    # Releases of helm write paths with dots or slashes.
    text = str(refusal.value)
    assert re.search(complaint, text) or re.search(complaint.replace("/", "."), text), text


@pytest.mark.parametrize(
    "values",
    [
        {"ports": {"dataPlane": 7780}},
        {"ports": {"metrics": 7700}, "metrics": {"enabled": False}},
        {"ports": {"http": 7700}, "router": {"http": False}},
        {"ports": {"health": 7700}},
    ],
)
def test_ports_that_no_pod_has_side_by_side_may_be_equal(values: Mapping[str, object]) -> None:
    assert render(values)


@pytest.mark.parametrize(
    ("request_", "limit"),
    [("1Gi", "1.1G"), ("1023Mi", "1Gi"), ("1500m", 1.5), (3, "3"), ("1e3", "1k"), ("1Ti", "1.1T")],
)
def test_a_limit_is_compared_as_kubernetes_does(request_: str | float, limit: str | float) -> None:
    """Each limit is no less than the request."""
    assert render({"fusedPools": {"a": {"resources": {"requests": {"x": request_}, "limits": {"x": limit}}}}})


@pytest.mark.parametrize(
    "pool",
    [
        {"config": {"memory": "3GB"}},
        {"config": {"memory": "3GiB"}},
        {"config": {"memory": "64GiB"}, "gpus": 1},
        {"config": {"memory": "64GiB"}, "hugePages": {"amount": "64Gi"}},
        {"config": {"memory": "64GiB"}, "resources": {"limits": {"memory": None}}},
    ],
)
def test_an_arena_may_fill_the_limit_and_lie_elsewhere(pool: Mapping[str, object]) -> None:
    assert render({"fusedPools": {"a": pool}})


def test_decode_pools_that_prefill_themselves_need_no_other() -> None:
    pools = {"prefillPools": {"default": None}, "decodePools": {"default": {"config": {"local_prefill": "fallback"}}}}
    kinds = [manifest["kind"] for manifest in render(pools)]
    assert kinds.count("StatefulSet") == 1


def test_an_image_volume_is_refused_where_the_cluster_has_none() -> None:
    values = {"model": {"source": {"alias": None, "image": {"reference": "m:1", "path": "m.gguf"}}}}
    with pytest.raises(ChartRefused, match=r"image volumes need Kubernetes 1\.33"):
        render(values, kube_version="1.32.0")


def test_the_examples_of_the_readme_make_a_mesh() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (CHART / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    for example in examples:
        names = {manifest["metadata"]["name"] for manifest in render(yaml.safe_load(example))}
        assert "mesh-pdmesh-prefill-long" in names or {"HTTPRoute", "GRPCRoute"} <= {
            manifest["kind"] for manifest in render(yaml.safe_load(example))
        }


def test_the_readme_describes_every_value() -> None:
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    missing = [key for key in values if f"`{key}" not in readme]
    missing += [f"poolDefaults.{key}" for key in values["poolDefaults"] if f"`{key}" not in readme]
    assert not missing
