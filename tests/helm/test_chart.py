"""What the chart makes: objects that Kubernetes takes, nodes that start with what they are given, fences that hold."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer
from pdmesh.v1 import inference_pb2
from support.helm_chart import (
    CHART,
    WORKLOAD_KINDS,
    Manifest,
    StartedContainer,
    lets_through,
    module_or_skip,
    named,
    of_kind,
    pod_template,
    render,
    run_helm,
    selects,
    started_containers,
)

from node_runtime.config import ComputeNodeConfig, NodeConfig
from node_runtime.engine.data_planes import tls_of
from node_runtime.rpc.health import LIVENESS_SERVICE
from pdmesh_cli.config_commands import ROLE_CONFIGS, resolve_arguments
from pdmesh_cli.main import app

kubernetes_validate = module_or_skip("kubernetes_validate")
_SHA256 = "0" * 64
_CPU_METRIC = {
    "type": "Resource",
    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
}
# Everything that can be switched on beside one another.
_EVERYTHING: Mapping[str, object] = {
    "image": {"digest": f"sha256:{_SHA256}"},
    "imagePullSecrets": [{"name": "pull"}],
    "model": {"name": "m", "source": {"url": {"url": "https://models/m.gguf", "sha256": _SHA256}}},
    "telemetry": {"otlpEndpoint": "http://collector:4317"},
    "router": {"replicas": 3, "http": False, "config": {"drain_grace_s": 120, "max_live_requests": 4096}},
    "poolDefaults": {"config": {"dtype": "bfloat16", "max_message_bytes": 4294967}},
    "prefillPools": {
        "default": None,
        "large": {
            "replicas": 2,
            "resources": {"limits": {"cpu": "6"}},
            "config": {"memory": "64GiB", "tensor_parallel": 2, "drain_grace_s": 0},
            "rdma": {"resource": "rdma/hca", "count": 1},
            "hugePages": {"pageSize": "1Gi", "amount": "8Gi"},
        },
        "small": {"autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 3, "metrics": [_CPU_METRIC]}},
    },
    "decodePools": {
        "default": {
            "config": {"memory": 8589934592, "local_prefill": "fallback", "drain_grace_s": 600.5},
            "resources": {"limits": {"memory": "9Gi"}},
        },
        "wide": {"replicas": 2, "config": {"tensor_parallel": 4, "num_threads": 7}},
    },
    "fusedPools": {
        "spare": {
            "gpus": 1,
            "resources": {"limits": {"cpu": 6}},
            "scheduling": {"nodeSelector": {"gpu": "yes"}, "tolerations": [{"operator": "Exists"}]},
        }
    },
    "scheduling": {"affinity": {"podAntiAffinity": {}}, "priorityClassName": "high", "runtimeClassName": "runc"},
    "podLabels": {"team": "llm"},
    "podAnnotations": {"note": "1"},
    "extraEnv": [{"name": "GLOO_SOCKET_IFNAME", "value": "eth0"}],
    "tls": {
        "enabled": True,
        "domain": "mesh.example",
        "routerNames": ["llm.example"],
        "clientCertificates": True,
        "secrets": {"fused": "given-fused"},
        "certManager": {"issuerRef": {"name": "ca", "kind": "Issuer"}},
    },
    "tenants": {"secretName": "who", "key": "file.yaml"},
    "test": {"tokenSecretName": "token"},
    "serviceAccount": {"annotations": {"role": "x"}},
}
_CERTIFIED = ("router", "prefill", "decode", "operator")
_SHAPES: Mapping[str, Mapping[str, object]] = {
    "as it comes": {},
    "everything": _EVERYTHING,
    "fused alone": {
        "prefillPools": {"default": None},
        "decodePools": {"default": None},
        "fusedPools": {"all": {"replicas": 2}},
    },
    "model on a volume": {
        "model": {"source": {"alias": None, "pvc": {"claimName": "models", "path": "llama/m.gguf"}}},
        "tls": {"enabled": True, "secrets": {role: f"given-{role}" for role in _CERTIFIED}},
        "serviceAccount": {"create": False},
    },
    "model in an image": {
        "model": {"source": {"alias": None, "image": {"reference": "models/m:1", "path": "m.gguf"}}},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
}
_SHAPES["everything"]["model"]["source"]["alias"] = None  # type: ignore[index]
_ROUTES = ("Ingress", "HTTPRoute", "GRPCRoute", "BackendTLSPolicy")
_NOT_OF_KUBERNETES = ("cert-manager.io/v1", "monitoring.coreos.com/v1")
_SELECTOR_LABELS = {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component")} | {"pdmesh.io/pool"}
every_shape = pytest.mark.parametrize("shape", _SHAPES)


def _workloads(manifests: list[Manifest]) -> list[Manifest]:
    return of_kind(manifests, *WORKLOAD_KINDS)


def _config_of(container: StartedContainer, directory: Path) -> NodeConfig:
    """What the node in the container would run with."""
    role, option, path = container.arguments
    assert option == "--config"
    file = directory / "node.yaml"
    file.write_text(container.files[path], encoding="utf-8")
    return resolve_arguments(role, file, [], container.environment).config


def _configs(manifests: list[Manifest], directory: Path) -> dict[str, NodeConfig]:
    """By node id."""
    nodes = [started for started in started_containers(manifests) if started.arguments[0] in ROLE_CONFIGS]
    return {config.node_id: config for config in (_config_of(node, directory) for node in nodes)}


def test_the_chart_passes_its_linter() -> None:
    assert "0 chart(s) failed" in run_helm("lint", "--strict", str(CHART))


@pytest.mark.parametrize(
    ("shape", "version"), [("everything", "1.30"), ("everything", "1.37"), ("model in an image", "1.37")]
)
def test_kubernetes_takes_every_object(shape: str, version: str) -> None:
    manifests = render(_SHAPES[shape], kube_version=f"{version}.0")
    assert len(manifests) > 5
    for manifest in manifests:
        if manifest["apiVersion"] not in _NOT_OF_KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)


@every_shape
def test_every_node_starts_with_what_it_is_given(shape: str, tmp_path: Path) -> None:
    manifests = render(_SHAPES[shape])
    configs = _configs(manifests, tmp_path)
    assert len(configs) == len(_workloads(manifests))
    for node_id, config in configs.items():
        assert f"-{config.role_name}-" in node_id
        assert (config.host, config.port) == ("0.0.0.0", 7700)


def test_the_service_of_the_routers_has_the_port_of_the_openai_api_where_it_is_served(tmp_path: Path) -> None:
    for shape, ports in (("as it comes", {"grpc": 7700, "http": 7780}), ("everything", {"grpc": 7700})):
        manifests = render(_SHAPES[shape])
        service = named(manifests, "Service", "mesh-pdmesh-router")
        assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
        (router,) = [config for config in _configs(manifests, tmp_path).values() if config.role_name == "router"]
        assert dict(router)["http"] == ("0.0.0.0:7780" if "http" in ports else "")
        (container,) = pod_template(named(manifests, "Deployment", "mesh-pdmesh-router"))["spec"]["containers"]
        assert {port["name"] for port in container["ports"]} >= set(ports)


@every_shape
def test_every_other_command_has_the_options_that_it_is_given(shape: str) -> None:
    commands = typer.main.get_command(app)
    seen = set()
    for started in started_containers(render(_SHAPES[shape])):
        name, *arguments = started.arguments
        if name not in ROLE_CONFIGS:
            # Raises for anything that the command would not take.
            commands.commands[name].make_context(name, list(arguments))
            seen.add(name)
    assert seen == ({"generate", "fetch"} if shape == "everything" else {"generate"})


@every_shape
def test_what_runs_before_a_node_ends_by_itself(shape: str) -> None:
    specs = [pod_template(workload)["spec"] for workload in _workloads(render(_SHAPES[shape]))]
    before = [container for spec in specs for container in spec.get("initContainers", ())]
    # A download, and none that Kubernetes would leave running.
    assert all(container["args"][0] == "fetch" and "restartPolicy" not in container for container in before)
    assert bool(before) == (shape == "everything")
    assert {container["args"][0] for spec in specs for container in spec["containers"]} <= set(ROLE_CONFIGS)


def _cpu_source(manifests: list[Manifest], pool: str) -> str:
    """What of its container becomes the threads of a node."""
    (container,) = pod_template(named(manifests, "StatefulSet", f"mesh-pdmesh-{pool}"))["spec"]["containers"]
    (entry,) = [entry for entry in container["env"] if entry["name"] == "PDMESH_NUM_THREADS"]
    return entry["valueFrom"]["resourceFieldRef"]["resource"]


def test_values_reach_the_nodes_they_are_meant_for(tmp_path: Path) -> None:
    manifests = render(_EVERYTHING)
    configs = _configs(manifests, tmp_path)
    large = dict(configs["mesh-pdmesh-prefill-large-0"])
    default = dict(configs["mesh-pdmesh-decode-default-0"])
    wide = dict(configs["mesh-pdmesh-decode-wide-0"])
    spare = dict(configs["mesh-pdmesh-fused-spare-0"])
    assert (large["memory"], large["tensor_parallel"], large["dtype"]) == (64 * 2**30, 2, "bfloat16")
    assert (default["memory"], default["max_message_bytes"], default["drain_grace_s"]) == (8 * 2**30, 4294967, 600.5)
    # Ranks share what there is, and who names a number of threads gets it; the rest gets the limit of the container.
    assert (large["num_threads"], wide["num_threads"], default["num_threads"]) == (None, 7, 3)
    threads = {
        started.environment["PDMESH_NODE_ID"]: started.environment.get("OMP_NUM_THREADS")
        for started in started_containers(manifests)
        if started.arguments[0] == "decode"
    }
    assert threads == {"mesh-pdmesh-decode-default-0": "3", "mesh-pdmesh-decode-wide-0": "7"}
    assert _cpu_source(manifests, "decode-default") == "requests.cpu"
    assert _cpu_source(manifests, "fused-spare") == "limits.cpu"
    assert (spare["device"], large["device"]) == ("cuda", "cpu")
    assert (spare["otlp_endpoint"], spare["served_model_name"]) == ("http://collector:4317", "m")
    assert {dict(config)["model"] for config in configs.values()} == {"/models/m.gguf"}


def test_nodes_are_listed_where_they_can_be_reached(tmp_path: Path) -> None:
    manifests = render(_EVERYTHING)
    configs = _configs(manifests, tmp_path)

    def addresses(role: str, pool: str, count: int) -> list[str]:
        name = f"mesh-pdmesh-{role}-{pool}"
        service = named(manifests, "Service", name)
        assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
        assert named(manifests, "StatefulSet", name)["spec"]["serviceName"] == name
        return [f"{name}-{index}.{name}.serving.svc.cluster.local:7700" for index in range(count)]

    router = dict(next(config for config in configs.values() if config.role_name == "router"))
    # The pool that scales is resolved, by all who must know its nodes under the same addresses.
    (small,) = addresses("prefill", "small", 1)
    large = addresses("prefill", "large", 2)
    assert set(router["prefill"]) == {*large, f"dns:{small.split('.', 1)[1]}"}
    assert set(router["decode"]) == {*addresses("decode", "default", 1), *addresses("decode", "wide", 2)}
    assert set(router["fused"]) == set(addresses("fused", "spare", 1))
    decode = configs["mesh-pdmesh-decode-wide-0"]
    assert set(dict(decode)["prefill"]) == set(router["prefill"])
    assert f"{decode.advertise_host}:7700" in router["decode"]


@every_shape
def test_probes_ask_what_nodes_answer(shape: str, tmp_path: Path) -> None:
    manifests = render(_SHAPES[shape])
    configs = _configs(manifests, tmp_path)
    for workload in _workloads(manifests):
        config = configs[f"{workload['metadata']['name']}-0"]
        # Probes speak no TLS.
        port = config.health_port if config.tls_cert else config.port
        (container,) = pod_template(workload)["spec"]["containers"]
        asked = {name: container[f"{name}Probe"]["grpc"] for name in ("startup", "readiness", "liveness")}
        assert asked == {
            "startup": {"port": port, "service": LIVENESS_SERVICE},
            "readiness": {"port": port},
            "liveness": {"port": port, "service": LIVENESS_SERVICE},
        }


@every_shape
def test_kubernetes_waits_longer_than_a_node_may_drain(shape: str, tmp_path: Path) -> None:
    manifests = render(_SHAPES[shape])
    configs = _configs(manifests, tmp_path)
    for workload in _workloads(manifests):
        spec = pod_template(workload)["spec"]
        (container,) = spec["containers"]
        hook = container.get("lifecycle", {}).get("preStop", {})
        is_router = workload["kind"] == "Deployment"
        assert hook == ({"sleep": {"seconds": 5}} if is_router else {})
        config = configs[f"{workload['metadata']['name']}-0"]
        slept_s = 5 if is_router else 0
        assert spec["terminationGracePeriodSeconds"] >= config.drain_grace_s + slept_s + 10


@every_shape
def test_pods_have_no_more_rights_than_they_need(shape: str) -> None:
    manifests = render(_SHAPES[shape])
    pods = [pod_template(workload) for workload in _workloads(manifests)] + of_kind(manifests, "Pod")
    for pod in pods:
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]) == (True, 10001)
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            rights = container["securityContext"]
            assert (rights["readOnlyRootFilesystem"], rights["allowPrivilegeEscalation"]) == (True, False)
            assert rights["capabilities"]["drop"] == ["ALL"]
            assert "memory" in container["resources"]["limits"]


def test_special_resources_are_asked_for_where_they_were_wanted() -> None:
    manifests = render(_EVERYTHING)
    containers = {
        workload["metadata"]["name"]: pod_template(workload)["spec"]["containers"][0]
        for workload in _workloads(manifests)
    }
    large = containers["mesh-pdmesh-prefill-large"]
    for amounts in large["resources"].values():
        assert (amounts["rdma/hca"], amounts["hugepages-1Gi"], amounts["memory"]) == (1, "8Gi", "3Gi")
    assert large["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert containers["mesh-pdmesh-fused-spare"]["resources"]["limits"]["nvidia.com/gpu"] == 1
    plain = containers["mesh-pdmesh-prefill-small"]
    assert set(plain["resources"]["limits"]) == {"memory"}
    assert plain["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@every_shape
def test_selectors_find_the_pods_of_their_own_workload_alone(shape: str) -> None:
    manifests = render(_SHAPES[shape])
    labels = {
        workload["metadata"]["name"]: pod_template(workload)["metadata"]["labels"] for workload in _workloads(manifests)
    }
    selectors = [(manifest["metadata"]["name"], manifest["spec"]["selector"]) for manifest in _workloads(manifests)]
    selectors += [
        (manifest["metadata"]["name"], {"matchLabels": manifest["spec"]["selector"]})
        for manifest in of_kind(manifests, "Service")
    ]
    selectors = [entry for entry in selectors if entry[0] != "mesh-pdmesh-metrics"]
    budgets = of_kind(manifests, "PodDisruptionBudget")
    selectors += [(budget["metadata"]["name"], budget["spec"]["selector"]) for budget in budgets]
    for owner, selector in selectors:
        assert [name for name in labels if selects(selector, labels[name])] == [owner]
        # What a release changes must not be in a selector, which cannot be changed.
        assert set(selector["matchLabels"]) <= _SELECTOR_LABELS
    # Nor may it replace a pod that it leaves as it is.
    assert all(not {"helm.sh/chart", "app.kubernetes.io/version"} & set(each) for each in labels.values())
    assert len(budgets) == (0 if shape == "model in an image" else len(labels))


@every_shape
def test_pods_of_a_workload_are_spread_and_replaced_without_leaving_nobody(shape: str) -> None:
    manifests = render(_SHAPES[shape])
    labels = {each["metadata"]["name"]: pod_template(each)["metadata"]["labels"] for each in _workloads(manifests)}
    for workload in _workloads(manifests):
        name, spec = workload["metadata"]["name"], workload["spec"]
        # Over machines, by those of their own workload: another mesh or pool beside them says nothing.
        spread = {each["topologyKey"]: each for each in pod_template(workload)["spec"]["topologySpreadConstraints"]}
        assert "kubernetes.io/hostname" in spread
        for constraint in spread.values():
            assert [other for other in labels if selects(constraint["labelSelector"], labels[other])] == [name]
            # A mesh on a single machine starts, too.
            assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
        if workload["kind"] == "Deployment":
            # A new router serves before an old one leaves.
            assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        else:
            # One node at a time, while new pools come up at once.
            assert spec["updateStrategy"] == {"type": "RollingUpdate"}
            assert spec["podManagementPolicy"] == "Parallel"
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] == 1


def test_the_pool_that_scales_leaves_its_size_to_the_autoscaler() -> None:
    manifests = render(_EVERYTHING)
    (scaler,) = of_kind(manifests, "HorizontalPodAutoscaler")
    target = named(manifests, "StatefulSet", scaler["spec"]["scaleTargetRef"]["name"])
    assert "replicas" not in target["spec"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (1, 3)
    assert scaler["spec"]["metrics"] == [_CPU_METRIC]
    # It leaves one node at a time, when it has not been needed for long and the one before it has drained.
    down = scaler["spec"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] >= 300
    (policy,) = down["policies"]
    assert (policy["type"], policy["value"]) == ("Pods", 1)
    assert policy["periodSeconds"] >= pod_template(target)["spec"]["terminationGracePeriodSeconds"]


def test_only_those_who_must_reach_a_port_do() -> None:
    manifests = render({"fusedPools": {"spare": {}}})
    labels = {
        workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: pod_template(workload)[
            "metadata"
        ]["labels"]
        for workload in _workloads(manifests)
    }
    labels["stranger"] = {"app": "else"}
    labels["another mesh"] = labels["decode"] | {"app.kubernetes.io/instance": "other"}
    reached = {
        (source, target, port)
        for source in labels
        for target in ("router", "prefill", "decode", "fused")
        for port in (7700, 7710, 7720, 7780, 15000, 17000, 22)
        if lets_through(manifests, source=labels[source], target=labels[target], port=port)
    }
    everybody = set(labels)
    data_plane = {
        (source, target, port)
        for source in ("prefill", "decode")
        for target in ("prefill", "decode")
        for port in (7710, 15000, 17000)
    }
    assert reached == {
        *((source, "router", port) for source in everybody for port in (7700, 7780)),
        *((source, target, 7700) for source in ("router", "decode") for target in ("prefill", "decode", "fused")),
        *((source, target, 7720) for source in everybody for target in ("router", "prefill", "decode", "fused")),
        *data_plane,
    }


def test_clients_can_be_named() -> None:
    manifests = render({"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "gateway"}}}]}})
    router = pod_template(named(manifests, "Deployment", "mesh-pdmesh-router"))["metadata"]["labels"]
    assert lets_through(manifests, source={"app": "gateway"}, target=router, port=7700)
    assert not lets_through(manifests, source={"app": "else"}, target=router, port=7700)


def test_with_certificates_the_ports_of_mooncake_stay_shut() -> None:
    manifests = render(_EVERYTHING)
    decode = pod_template(named(manifests, "StatefulSet", "mesh-pdmesh-decode-wide"))["metadata"]["labels"]
    reached = [
        port for port in (7710, 15000, 17000) if lets_through(manifests, source=decode, target=decode, port=port)
    ]
    assert reached == [7710]


@pytest.mark.parametrize(
    "config", [{"transfer_protocol": "rdma"}, {"data_plane": "mooncake"}, {"data_plane_tls": "off"}]
)
def test_with_certificates_mooncake_has_its_ports_where_it_was_asked_for(config: Mapping[str, object]) -> None:
    secrets = {role: f"given-{role}" for role in _CERTIFIED}
    manifests = render({"tls": {"enabled": True, "secrets": secrets}, "poolDefaults": {"config": config}})
    decode = pod_template(named(manifests, "StatefulSet", "mesh-pdmesh-decode-default"))["metadata"]["labels"]
    assert lets_through(manifests, source=decode, target=decode, port=15000)


def test_nobody_is_let_in_from_outside_unless_that_is_asked_for() -> None:
    assert not of_kind(render({}), *_ROUTES)


def test_an_ingress_leads_to_the_http_api_alone() -> None:
    values = {"ingress": {"enabled": True, "className": "c", "host": "llm.example", "tlsSecretName": "t"}}
    manifests = render(values)
    (ingress,) = of_kind(manifests, *_ROUTES)
    kubernetes_validate.validate(ingress, "1.37", strict=True)
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["path"]) == ("llm.example", "/v1")
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.example"], "secretName": "t"}]
    backend = path["backend"]["service"]
    service = named(manifests, "Service", backend["name"])
    assert backend["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]


def test_routes_of_a_gateway_lead_to_what_is_for_clients() -> None:
    values = {
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "public", "namespace": "gateways"}],
            "http": {"hostnames": ["llm.example"], "requestTimeout": "0s"},
            "grpc": {"hostnames": ["grpc.example"]},
        }
    }
    manifests = render(values)
    routes = {route["kind"]: route["spec"] for route in of_kind(manifests, *_ROUTES)}
    assert routes.keys() == {"HTTPRoute", "GRPCRoute"}
    ports = {port["name"]: port["port"] for port in named(manifests, "Service", "mesh-pdmesh-router")["spec"]["ports"]}
    for kind, port in (("HTTPRoute", "http"), ("GRPCRoute", "grpc")):
        assert routes[kind]["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
        (rule,) = routes[kind]["rules"]
        assert rule["backendRefs"] == [{"name": "mesh-pdmesh-router", "port": ports[port]}]
    (matched,) = routes["GRPCRoute"]["rules"][0]["matches"]
    assert matched["method"]["service"] == inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
    assert routes["HTTPRoute"]["rules"][0]["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert routes["HTTPRoute"]["rules"][0]["timeouts"] == {"request": "0s"}


def _faults_of_routes(routes: list[Manifest]) -> list[str]:
    """What the schemas of the Gateway API do not allow. Skips the test where `make setup` could not get them."""
    folder = Path(sys.prefix) / "gateway_api"
    if shutil.which("node") is None or not (folder / "node_modules" / "@kubernetes-models" / "gateway-api").exists():
        pytest.skip("the schemas of the Gateway API come with npm, which was not here when `make setup` ran")
    result = subprocess.run(
        ["node", str(CHART.parents[1] / "tests" / "support" / "gateway_api.mjs"), str(folder)],
        input=json.dumps(routes),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_the_gateway_api_takes_every_route() -> None:
    gateway = {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateways"}],
        "http": {"hostnames": ["llm.example"], "requestTimeout": "0s"},
        "grpc": {"hostnames": ["*.grpc.example"]},
        "authorityConfigMap": "authority",
    }
    tls = {"enabled": True, "certManager": {"issuerRef": {"name": "ca", "kind": "Issuer"}}}
    routes = of_kind(render({"gateway": gateway, "tls": tls}), "HTTPRoute", "GRPCRoute", "BackendTLSPolicy")
    assert len(routes) == 3
    assert _faults_of_routes(routes) == []
    for route in routes:
        refers = route["spec"].get("parentRefs") or route["spec"]["targetRefs"]
        del refers[0]["name"]
    assert [fault.partition(":")[0] for fault in _faults_of_routes(routes)] == [route["kind"] for route in routes]


def test_a_gateway_knows_the_authority_of_the_routers_and_a_name_that_their_certificate_has() -> None:
    gateway = {
        "enabled": True,
        "parentRefs": [{"name": "public"}],
        "http": {"enabled": False},
        "grpc": {"hostnames": ["grpc.example"]},
        "authorityConfigMap": "authority",
    }
    tls = {"enabled": True, "certManager": {"issuerRef": {"name": "ca", "kind": "Issuer"}}}
    manifests = render({"gateway": gateway, "tls": tls})
    (policy,) = of_kind(manifests, "BackendTLSPolicy")
    certificate = named(manifests, "Certificate", "mesh-pdmesh-router-tls")
    assert policy["spec"]["validation"]["hostname"] in certificate["spec"]["dnsNames"]
    assert policy["spec"]["validation"]["caCertificateRefs"][0]["name"] == "authority"
    (target,) = policy["spec"]["targetRefs"]
    assert named(manifests, target["kind"], target["name"])


def test_certificates_name_what_a_node_may_do_and_no_host_but_those_that_clients_dial() -> None:
    manifests = render(_EVERYTHING)
    certificates = {
        certificate["spec"]["secretName"]: certificate["spec"] for certificate in of_kind(manifests, "Certificate")
    }
    # That of fused nodes was given.
    assert set(certificates) == {f"mesh-pdmesh-{role}-tls" for role in _CERTIFIED}
    for role in _CERTIFIED:
        spec = certificates[f"mesh-pdmesh-{role}-tls"]
        assert {"mesh.example", f"{role}.mesh.example"} <= set(spec["dnsNames"])
        assert set(spec["usages"]) >= {"server auth", "client auth"}
        others = {f"{other}.mesh.example" for other in (*_CERTIFIED, "fused") if other != role}
        assert not others & set(spec["dnsNames"])
        if role != "router":
            assert set(spec["dnsNames"]) == {"mesh.example", f"{role}.mesh.example"}
    router_names = certificates["mesh-pdmesh-router-tls"]["dnsNames"]
    assert {"mesh-pdmesh-router", "mesh-pdmesh-router.serving.svc", "llm.example"} <= set(router_names)


@pytest.mark.parametrize("shape", ["everything", "model on a volume"])
def test_nodes_find_their_certificate_where_their_file_says(shape: str, tmp_path: Path) -> None:
    manifests = render(_SHAPES[shape])
    for node_id, config in _configs(manifests, tmp_path).items():
        values = dict(config)
        kind = "Deployment" if config.role_name == "router" else "StatefulSet"
        spec = pod_template(named(manifests, kind, node_id.removesuffix("-0")))["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        files = [Path(values[f"tls_{name}"]) for name in ("cert", "key", "ca")]
        assert [file.name for file in files] == ["tls.crt", "tls.key", "ca.crt"]
        assert {mounts[str(file.parent)] for file in files} == {"tls"}
        if isinstance(config, ComputeNodeConfig):
            data_plane = tls_of(config)
            assert data_plane is not None
            assert [data_plane.certificate, data_plane.key, data_plane.authority] == files
        is_given = shape == "model on a volume" or config.role_name == "fused"
        secret = f"given-{config.role_name}" if is_given else f"mesh-pdmesh-{config.role_name}-tls"
        assert volumes["tls"]["secret"]["secretName"] == secret


def test_routers_find_their_tenants_and_the_test_shows_a_token(tmp_path: Path) -> None:
    manifests = render(_EVERYTHING)
    (router,) = [config for config in _configs(manifests, tmp_path).values() if config.role_name == "router"]
    spec = pod_template(named(manifests, "Deployment", "mesh-pdmesh-router"))["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert dict(router)["tenants"] == f"{mounts['tenants']}/file.yaml"
    (test,) = of_kind(manifests, "Pod")
    (container,) = test["spec"]["containers"]
    sources = {entry["name"]: entry.get("valueFrom") or entry["value"] for entry in container["env"]}
    assert sources["PDMESH_TOKEN"] == {"secretKeyRef": {"name": "token", "key": "token"}}
    assert sources["PDMESH_TLS_SERVER_NAME"] == "mesh.example"
    without_token = render({"tenants": {"secretName": "who"}})
    assert not of_kind(without_token, "Pod")


@pytest.mark.parametrize(
    ("shape", "model", "volume"),
    [
        ("as it comes", "smollm2", None),
        ("everything", "/models/m.gguf", {"emptyDir": {}}),
        (
            "model on a volume",
            "/models/llama/m.gguf",
            {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        ),
        ("model in an image", "/models/m.gguf", {"image": {"reference": "models/m:1", "pullPolicy": "IfNotPresent"}}),
    ],
)
def test_the_model_is_where_the_nodes_look_for_it(
    shape: str, model: str, volume: Manifest | None, tmp_path: Path
) -> None:
    manifests = render(_SHAPES[shape])
    assert {dict(config)["model"] for config in _configs(manifests, tmp_path).values()} == {model}
    for workload in _workloads(manifests):
        spec = pod_template(workload)["spec"]
        volumes = {each.pop("name"): each for each in [dict(volume) for volume in spec["volumes"]]}
        assert volumes.get("models") == volume
        writable = {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"] if not mount.get("readOnly")}
        assert writable >= {"/tmp"}


def test_another_configuration_makes_other_pods_and_the_same_one_does_not() -> None:
    def checksums(values: Mapping[str, object]) -> dict[str, str]:
        return {
            workload["metadata"]["name"]: pod_template(workload)["metadata"]["annotations"]["pdmesh.io/config-checksum"]
            for workload in _workloads(render(values))
        }

    before = checksums({})
    for values, replaced in (
        ({"decodePools": {"default": {"config": {"memory": "2GiB"}}}}, ["mesh-pdmesh-decode-default"]),
        # Routers are cheap; decode nodes keep their caches when prefill nodes come.
        ({"prefillPools": {"default": {"replicas": 2}}}, ["mesh-pdmesh-router"]),
        ({"networkPolicy": {"enabled": False}}, []),
    ):
        after = checksums(values)
        assert [name for name in before if before[name] != after[name]] == replaced
