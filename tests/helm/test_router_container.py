"""The router of a release in a container: read-only, non-root, without capabilities and without a network.

PDMESH_TEST_IMAGE names an image of `make image`, of either kind; `make check` runs this with one that it has built.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.containers import IMAGE, OF_AN_IMAGE, podman
from support.helm_chart import render, started_containers
from support.tiny_checkpoint import write_tiny_checkpoint

from node_runtime.rpc.health import LIVENESS_SERVICE

_PYTHON = "/opt/pdmesh/bin/python"
_ISOLATED = ["--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges"]
_START_S = 120.0
_STOP_S = 60
# As the kubelet asks, which has a client of its own.
_ASK_HEALTH = f"""
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
stub = health_pb2_grpc.HealthStub(grpc.insecure_channel("127.0.0.1:7700"))
answer = stub.Check(health_pb2.HealthCheckRequest(service="{LIVENESS_SERVICE}"), timeout=5)
print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
"""
pytestmark = [*OF_AN_IMAGE]


def _run(
    *arguments: str, entrypoint: str = "pdmesh", options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a command of the image to its end."""
    return podman("run", "--rm", *_ISOLATED, *options, f"--entrypoint={entrypoint}", IMAGE, *arguments)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[str]:
    """The id of a container that runs what the chart gives a router."""
    model = write_tiny_checkpoint(tmp_path / "models" / "tiny")
    source = {"source": {"alias": None, "pvc": {"claimName": "models", "path": model.name}}}
    started = next(one for one in started_containers(render({"model": source})) if one.arguments[0] == "router")
    files = tmp_path / "etc"
    files.mkdir()
    for path, text in started.files.items():
        (files / Path(path).name).write_text(text, encoding="utf-8")
    volumes = [f"--volume={files}:/etc/pdmesh:ro", f"--volume={model.parent}:/models:ro"]
    environment = [f"--env={name}={value}" for name, value in started.environment.items()]
    begun = podman("run", "--detach", *_ISOLATED, *volumes, *environment, IMAGE, *started.arguments)
    assert begun.returncode == 0, begun.stderr
    container = begun.stdout.strip()
    yield container
    podman("rm", "--force", "--time=1", container)


def _health(container: str) -> str:
    return podman("exec", container, _PYTHON, "-c", _ASK_HEALTH).stdout.strip()


def test_a_router_is_alive_reads_its_file_and_leaves_when_it_is_told(router: str) -> None:
    deadline_s = time.monotonic() + _START_S
    while (found := _health(router)) != "SERVING" and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert found == "SERVING", podman("logs", router).stderr
    checked = podman("exec", router, "pdmesh", "config", "check", "/etc/pdmesh/node.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert podman("stop", f"--time={_STOP_S}", router).returncode == 0
    status = podman("inspect", "--format={{.State.ExitCode}}", router).stdout.strip()
    assert status == "0", podman("logs", router).stderr


def test_nothing_of_the_image_can_be_written_to_by_its_user() -> None:
    try_all = "for path in / /opt/pdmesh /etc /var; do touch $path/x 2>/dev/null && echo $path; done"
    script = f"id -u; id -g; {try_all}; touch /tmp/x"
    result = _run("-c", script, entrypoint="/bin/sh")
    assert (result.returncode, result.stdout.split()) == (0, ["10001", "10001"]), result.stderr


def test_a_file_with_a_wrong_key_is_refused_by_its_name(tmp_path: Path) -> None:
    files = tmp_path / "etc"
    files.mkdir()
    (files / "node.yaml").write_text("role: router\nmemroy: 1GiB\n", encoding="utf-8")
    options = (f"--volume={files}:/etc/pdmesh:ro",)
    result = _run("config", "check", "/etc/pdmesh/node.yaml", options=options)
    assert result.returncode != 0
    assert "memroy" in result.stdout + result.stderr
