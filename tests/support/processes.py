"""Real node processes for tests: each runs the command of a user, is dialled over gRPC and killed by pid."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc

from pdmesh_cli.parent_death import PARENT_PID_VARIABLE
from support.preloaded import origin

START_TIMEOUT_S = 90.0


class NodeProcess:
    """One `pdmesh <role>` process."""

    def __init__(
        self,
        role: str,
        arguments: Sequence[str],
        folder: Path,
        *,
        name: str | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix`: those of the process that this one is forked from."""
        self.name = name or role
        self._role, self._arguments, self._folder, self._prefix = role, tuple(arguments), folder, prefix
        self.log_path = folder / f"{self.name}.log"
        ready_path = folder / f"{self.name}.ready"
        ready_path.unlink(missing_ok=True)
        self.log = self.log_path.open("ab")
        parent = origin(*prefix)
        # The child asks the kernel to die with its parent.
        own = {"PDMESH_READY_FILE": str(ready_path), PARENT_PID_VARIABLE: str(parent.pid)}
        self.process = parent.start(
            (role, *arguments), environment={**os.environ, **own}, stdout=self.log, stderr=self.log
        )
        self.announced = self._wait_until_ready(ready_path)
        self.address = self.announced["address"]
        self.channel = grpc.insecure_channel(self.address)
        self.node = mesh_pb2_grpc.NodeStub(self.channel)

    def _wait_until_ready(self, ready_path: Path) -> dict[str, str]:
        """What the node says about itself."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if ready_path.exists():
                announced: dict[str, str] = json.loads(ready_path.read_text())
                return announced
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} exited with {self.process.returncode}:\n{self.log_text()}")
            time.sleep(0.02)
        self.process.kill()
        raise RuntimeError(f"{self.name} was not ready within {START_TIMEOUT_S} s:\n{self.log_text()}")

    def start_successor(self) -> NodeProcess:
        """Another process with the same arguments at the address of this one, which must have ended."""
        port = self.address.rsplit(":", 1)[1]
        arguments = [*self._arguments, "--port", port]
        return NodeProcess(self._role, arguments, self._folder, name=f"{self.name}-again", prefix=self._prefix)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace")

    def status(self) -> mesh_pb2.NodeStatus:
        return self.node.GetNodeStatus(mesh_pb2.GetNodeStatusRequest(), timeout=10)

    def info(self) -> mesh_pb2.NodeInfo:
        return self.node.GetNodeInfo(mesh_pb2.GetNodeInfoRequest(), timeout=10)

    def clear_cache(self) -> None:
        self.node.ClearCache(mesh_pb2.ClearCacheRequest(), timeout=10)

    def health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status)

    def wait_serving(self, timeout_s: float = 60.0) -> None:
        wait_until(
            lambda: self.health() == health_pb2.HealthCheckResponse.SERVING, timeout_s, f"{self.name} is serving"
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError(f"{self.name} ignored SIGTERM for {timeout_s} s:\n{self.log_text()}") from None
        finally:
            self.channel.close()
            self.log.close()


def wait_until(condition, timeout_s: float, what: str) -> None:
    """Polls another process's state: the one place where tests wait for the clock."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(grpc.RpcError):
            if condition():
                return
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


@contextlib.contextmanager
def stopping(*nodes: NodeProcess) -> Iterator[None]:
    """Stops the nodes in the given order, whatever happens."""
    try:
        yield
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.process.kill()
                node.process.wait(timeout=10)
            node.channel.close()
            node.log.close()
