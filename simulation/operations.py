"""The operator of a simulated mesh: asks nodes to leave, restarts them one after another, and clears caches.

It does so as people do, by signals and over the Node service, and checks what the nodes answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc

from node_runtime.errors import NodeError
from node_runtime.rpc import Transport, connect
from node_runtime.rpc.errors import status_of
from simulation.faults import Asking, RollingRestart
from simulation.findings import Journal
from simulation.hosts import Host
from simulation.kernel import Process
from simulation.settings import MAX_MESSAGE_BYTES
from simulation.tenants import OPERATOR, credentials_of

_CALL_TIMEOUT_S = 3.0
_LOOK_INTERVAL_S = 0.2
# A node that does not get ready is not waited for without end.
_READY_BOUND_S = 30.0
# Whoever asks a node both ways does not do so in one instant.
_SECOND_ASKING_S = 0.01


class Operator:
    """One process, which nothing befalls."""

    def __init__(self, process: Process, transport: Transport, hosts: Mapping[str, Host], journal: Journal) -> None:
        self._process = process
        self._hosts = hosts
        self._channels = {
            name: connect(
                host.address,
                max_message_bytes=MAX_MESSAGE_BYTES,
                transport=transport,
                metadata=credentials_of(OPERATOR),
            )
            for name, host in hosts.items()
        }
        self._journal = journal

    @property
    def is_idle(self) -> bool:
        return not self._process.num_tasks

    def drain(self, name: str, asking: Asking, restart_after_s: float) -> None:
        self._hosts[name].expect_to_leave(restart_after_s)
        self._process.create_task(self._ask_to_leave(name, asking))

    def restart_all(self, fault: RollingRestart) -> None:
        self._process.create_task(self._restart_all(fault))

    def clear(self, name: str) -> None:
        self._process.create_task(self._clear(name))

    async def _ask_to_leave(self, name: str, asking: Asking) -> None:
        host = self._hosts[name]
        meant = host.process
        if asking is not Asking.SIGNAL:
            channel = self._channels[name]
            stub = channel.stub(mesh_pb2_grpc.NodeStub)
            try:
                await channel.unary(stub.Drain, mesh_pb2.DrainRequest(), timeout_s=_CALL_TIMEOUT_S)
            except NodeError as error:
                reason = str(error)
                self._journal.note("operator", lambda: f"{name} cannot be told to drain: {reason}")
        if asking is Asking.BOTH:
            await asyncio.sleep(_SECOND_ASKING_S)
        # A signal goes to the process that it was meant for, not to one that was started in its place.
        if asking is not Asking.CALL and host.process is meant:
            host.leave("SIGTERM received")

    async def _restart_all(self, fault: RollingRestart) -> None:
        for name in fault.hosts:
            host, num_boots = self._hosts[name], self._hosts[name].num_boots
            host.expect_to_leave(fault.restart_after_s)
            await self._ask_to_leave(name, fault.asking)
            while host.num_boots == num_boots:
                await asyncio.sleep(_LOOK_INTERVAL_S)
            await self._wait_until_serving(name)
            await asyncio.sleep(fault.pause_s)
        self._journal.count("rolling restart")

    async def _wait_until_serving(self, name: str) -> None:
        event_loop = asyncio.get_running_loop()
        end_s = event_loop.time() + _READY_BOUND_S
        channel = self._channels[name]
        stub = channel.stub(mesh_pb2_grpc.NodeStub)
        while event_loop.time() < end_s:
            try:
                status = await channel.unary(
                    stub.GetNodeStatus, mesh_pb2.GetNodeStatusRequest(), timeout_s=_CALL_TIMEOUT_S
                )
            except NodeError:
                status = mesh_pb2.NodeStatus()
            if status.serving:
                self._journal.note("operator", lambda: f"{name} serves again")
                return
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def _clear(self, name: str) -> None:
        channel = self._channels[name]
        stub = channel.stub(mesh_pb2_grpc.NodeStub)
        num_clears = self._hosts[name].num_clears
        status = "OK"
        try:
            await channel.unary(stub.ClearCache, mesh_pb2.ClearCacheRequest(), timeout_s=_CALL_TIMEOUT_S)
        except NodeError as error:
            status = status_of(error).name
        self._journal.note("operator", lambda: f"clearing the cache of {name} ends in {status}")
        self._journal.count(f"clear {status}")
        if status == "OK" and self._hosts[name].num_clears == num_clears:
            self._journal.find("clear", f"{name} says that its cache is cleared, and nothing was")
        if status not in ("OK", "FAILED_PRECONDITION", "UNAVAILABLE", "DEADLINE_EXCEEDED"):
            self._journal.find("clear", f"clearing the cache of {name} ends in {status}")
