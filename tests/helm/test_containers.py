"""What the chart renders, run in containers: read-only, non-root, without capabilities, by the names of the pods.

PDMESH_TEST_IMAGE names an image of `make image`; without it nothing is run here, for building one takes minutes.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.containers import IMAGE, OF_AN_IMAGE, podman
from support.helm_chart import StartedContainer, render, started_containers

from pdmesh_cli.model_fetch import ModelFetchError, resolve_model

_SUBNET = "10.89.77"
_START_S = 240.0
pytestmark = [*OF_AN_IMAGE]


def _done(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@dataclass(kw_only=True)
class Cluster:
    """Containers in a network of their own, each known to the others by the name that its pod would have."""

    network: str
    directory: Path
    model: Path
    hosts: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, host: str, started: StartedContainer) -> None:
        """Runs a node as its pod would."""
        files = self.directory / name
        files.mkdir()
        for path, text in started.files.items():
            (files / Path(path).name).write_text(text, encoding="utf-8")
        volumes = [f"--volume={files}:/etc/pdmesh:ro", f"--volume={self.model.parent}:/models:ro"]
        address = ["--ip", self.hosts[host], "--hostname", name, "--name", f"{self.network}-{name}"]
        _done(podman("run", "--detach", *address, *volumes, *self._options(started, but=host), *started.arguments))

    def run(self, started: StartedContainer) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return podman("run", "--rm", *self._options(started), *started.arguments)

    def _options(self, started: StartedContainer, *, but: str = "") -> list[str]:
        hosts = [f"--add-host={name}:{address}" for name, address in self.hosts.items() if name != but]
        environment = [f"--env={name}={value}" for name, value in started.environment.items()]
        rights = ["--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges"]
        return [f"--network={self.network}", *rights, *hosts, *environment, IMAGE]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    try:
        model = resolve_model("smollm2")
    except ModelFetchError as error:
        pytest.skip(str(error))
    network = f"pdmesh-{uuid.uuid4().hex[:8]}"
    _done(podman("network", "create", f"--subnet={_SUBNET}.0/24", network))
    yield Cluster(network=network, directory=tmp_path, model=model)
    names = podman("ps", "--all", "--quiet", f"--filter=network={network}").stdout.split()
    if names:
        podman("rm", "--force", "--time=1", *names)
    podman("network", "rm", "--force", network)


def test_a_release_answers_and_its_nodes_leave_when_they_are_told(cluster: Cluster) -> None:
    values = {
        "model": {"source": {"alias": None, "pvc": {"claimName": "models", "path": cluster.model.name}}},
        "router": {"replicas": 1},
        "poolDefaults": {"config": {"memory": "256MiB", "num_threads": 1, "max_batch_size": 8, "token_budget": 128}},
    }
    *nodes, test = sorted(started_containers(render(values)), key=lambda started: started.arguments[0] == "generate")
    by_name = {started.environment["PDMESH_NODE_ID"]: started for started in nodes}
    # Routers are known by their Service.
    hosts = {
        name: started.environment.get("PDMESH_ADVERTISE_HOST", name.removesuffix("-0"))
        for name, started in by_name.items()
    }
    cluster.hosts = {host: f"{_SUBNET}.{index}" for index, host in enumerate(hosts.values(), start=10)}
    for name, started in by_name.items():
        cluster.start(name, hosts[name], started)
    deadline_s = time.monotonic() + _START_S
    while (answer := cluster.run(test)).returncode and time.monotonic() < deadline_s:
        time.sleep(1.0)
    assert answer.stdout, _done(answer)
    assert "prefill on mesh-pdmesh-prefill-default-0, decode on mesh-pdmesh-decode-default-0" in answer.stderr
    for name in by_name:
        container = f"{cluster.network}-{name}"
        _done(podman("stop", "--time=60", container))
        assert _done(podman("inspect", "--format={{.State.ExitCode}}", container)).strip() == "0"
