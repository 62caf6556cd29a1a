"""`pdmesh drain`: tells a node to finish what it has and leave, and waits for that when asked to."""

from __future__ import annotations

import asyncio
import time

from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc

from pdmesh_cli.client import client_errors
from pdmesh_cli.client_types import PdmeshError
from pdmesh_cli.identity import ANONYMOUS, Identity
from pdmesh_cli.status import ask_node

_POLL_S = 0.1
# What a node takes to leave once its last call has ended: threads to join, memory to give back.
_DEPARTURE_S = 30.0


async def drain_node(address: str, *, timeout_s: float, identity: Identity = ANONYMOUS) -> mesh_pb2.DrainResponse:
    """Returns when the node at `address` refuses new work. Raises PdmeshError."""
    with client_errors():
        channel = identity.connect(address)
        try:
            stub = channel.stub(mesh_pb2_grpc.NodeStub)
            return await channel.unary(stub.Drain, mesh_pb2.DrainRequest(), timeout_s=timeout_s)
        finally:
            await channel.close()


async def wait_until_left(
    address: str, node_id: str, *, grace_s: float, timeout_s: float, identity: Identity = ANONYMOUS
) -> None:
    """Returns when nobody of that name drains at `address` any more: the node is gone, or its successor answers.

    Raises PdmeshError when it is still there after its grace period. `timeout_s` bounds one question.
    """
    deadline_s = time.monotonic() + grace_s + _DEPARTURE_S
    while True:
        report = await ask_node(address, timeout_s=timeout_s, identity=identity)
        if report.info is None or report.status is None or report.info.node_id != node_id or not report.status.draining:
            return
        if time.monotonic() >= deadline_s:
            raise PdmeshError("DEADLINE_EXCEEDED", f"{node_id} at {address} is still there after its grace period")
        await asyncio.sleep(_POLL_S)


def drain_line(address: str, answer: mesh_pb2.DrainResponse) -> str:
    """What the user reads."""
    begun = "was draining already" if answer.was_draining else "drains"
    num_calls = answer.num_running_calls
    if not num_calls:
        return f"{answer.node_id} at {address} {begun}: nothing is running, it leaves now"
    calls = "1 call" if num_calls == 1 else f"{num_calls:,} calls"
    return f"{answer.node_id} at {address} {begun}: {calls} to finish, at most {answer.grace_s:g} s"
