"""The chart as the real `helm` renders it, and what a container of it would be started with."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm" / "pdmesh"
Manifest = dict[str, object]
Values = Mapping[str, object]
WORKLOAD_KINDS = ("Deployment", "StatefulSet")


class ChartRefused(Exception):
    """helm would not render; the text is what it said."""


def program_or_skip(name: str) -> str:
    """The path of a program that `make setup` puts into .venv. Skips the test where it is missing, but not in CI."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        _give_up(f"{name} is not installed: `make setup` puts it into .venv")
        raise AssertionError
    return found


def module_or_skip(name: str) -> ModuleType:
    """Likewise for a Python package, when a test module is imported."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        _give_up(f"{name} is not installed: `make setup` puts it into .venv")
        raise


def _give_up(reason: str) -> None:
    if not os.environ.get("CI"):
        pytest.skip(reason, allow_module_level=True)
    pytest.fail(reason)


def run_helm(*arguments: str) -> str:
    """Standard output. Raises ChartRefused."""
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {f"HELM_{name}_HOME": home for name in ("CACHE", "CONFIG", "DATA")}
        result = subprocess.run(
            [program_or_skip("helm"), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    if result.returncode:
        raise ChartRefused(result.stdout + result.stderr)
    return result.stdout


def render(values: Values, *, kube_version: str = "1.37.0") -> list[Manifest]:
    """All objects of a release called `mesh` in the namespace `serving`. Raises ChartRefused."""
    text = _rendered(json.dumps(values, sort_keys=True), kube_version)
    return [manifest for manifest in yaml.load_all(text, Loader=yaml.CSafeLoader) if manifest]


@functools.cache
def _rendered(values: str, kube_version: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(values)
        file.flush()
        return run_helm(
            "template", "mesh", str(CHART), "-n", "serving", "--kube-version", kube_version, "-f", file.name
        )


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"] == name]
    return found


def pod_template(workload: Manifest) -> Manifest:
    return workload["spec"]["template"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedContainer:
    """A container as it would run in the first pod of its workload."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    """Text by path, of the config maps that are mounted."""


def started_containers(manifests: list[Manifest]) -> Iterator[StartedContainer]:
    """Every container of every workload and of the test pod, those that run first included."""
    for manifest in of_kind(manifests, *WORKLOAD_KINDS, "Pod"):
        pod = manifest if manifest["kind"] == "Pod" else pod_template(manifest)
        name = manifest["metadata"]["name"] if manifest["kind"] == "Pod" else f"{manifest['metadata']['name']}-0"
        spec = pod["spec"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield StartedContainer(
                arguments=tuple(map(str, container["args"])),
                environment=_environment(container, pod_name=name),
                files=dict(_files(manifests, spec, container)),
            )


def _environment(container: Manifest, *, pod_name: str) -> dict[str, str]:
    environment: dict[str, str] = {}
    for entry in container.get("env", ()):
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "metadata.name"
            value = pod_name
        elif "resourceFieldRef" in source:
            assert source["resourceFieldRef"]["containerName"] == container["name"]
            value = "3"
        elif "secretKeyRef" in source:
            value = "secret"
        else:
            value = re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], str(entry["value"]))
        environment[entry["name"]] = value
    return environment


def _files(manifests: list[Manifest], pod_spec: Manifest, container: Manifest) -> Iterator[tuple[str, str]]:
    maps = {
        volume["name"]: volume["configMap"]["name"] for volume in pod_spec.get("volumes", ()) if "configMap" in volume
    }
    for mount in container.get("volumeMounts", ()):
        if mount["name"] in maps:
            for key, text in named(manifests, "ConfigMap", maps[mount["name"]])["data"].items():
                yield f"{mount['mountPath']}/{key}", text


def selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Whether a label selector of Kubernetes matches."""
    pairs_match = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        pairs_match = pairs_match and labels.get(expression["key"]) in expression["values"]
    return pairs_match


def lets_through(manifests: list[Manifest], *, source: Mapping[str, str], target: Mapping[str, str], port: int) -> bool:
    """Whether a pod with the labels `source` in this namespace may reach a TCP port of one with the labels `target`.

    Peers of other namespaces are taken for everybody.
    """
    policies = [
        policy for policy in of_kind(manifests, "NetworkPolicy") if selects(policy["spec"]["podSelector"], target)
    ]
    return not policies or any(
        any("namespaceSelector" in peer or selects(peer["podSelector"], source) for peer in rule["from"])
        and any(entry["port"] <= port <= entry.get("endPort", entry["port"]) for entry in rule["ports"])
        for policy in policies
        for rule in policy["spec"]["ingress"]
    )
