"""`pdmesh drain` against a node: what the user reads, and how long `--wait` waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, mesh_pb2, mesh_pb2_grpc
from typer.testing import CliRunner, Result

from node_runtime.config import NodeConfig
from node_runtime.rpc import NodeService, RpcContext, RpcServer, connect
from pdmesh_cli.client_types import PdmeshError
from pdmesh_cli.drain import wait_until_left
from pdmesh_cli.main import app


class Reporter:
    """A decode node."""

    def info(self) -> mesh_pb2.NodeInfo:
        return mesh_pb2.NodeInfo(node_id="decode-0", role=mesh_pb2.NODE_ROLE_DECODE)

    async def status(self) -> mesh_pb2.NodeStatus:
        return mesh_pb2.NodeStatus(serving=True)

    async def clear_cache(self) -> bool:
        return True


class Endless:
    """A Decode service whose answers go on for ever."""

    async def Generate(
        self, request: decode_pb2.DecodeRequest, context: RpcContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        yield decode_pb2.DecodeResponse()
        await asyncio.Event().wait()


@dataclass
class Node:
    """A node that stops when it is told to, as a process would."""

    server: RpcServer
    address: str = ""
    stops: list[asyncio.Task[None]] = field(default_factory=list)

    def stop(self, reason: str) -> None:
        if not self.stops:
            self.stops.append(asyncio.create_task(self.server.stop(self.server.drain_grace_s)))


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    server = RpcServer(NodeConfig(node_id="decode-0", drain_grace_s=0.5))
    node = Node(server)
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, Endless())
    server.add(mesh_pb2_grpc.add_NodeServicer_to_server, NodeService(Reporter(), server, node.stop))
    node.address = f"127.0.0.1:{await server.start()}"
    yield node
    await asyncio.gather(*node.stops)
    await server.stop(grace_s=0)


async def drain(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["drain", *arguments])


@asynccontextmanager
async def running_stream(node: Node) -> AsyncIterator[None]:
    channel = connect(node.address, max_message_bytes=4096)
    stub = channel.stub(decode_pb2_grpc.DecodeStub)
    stream = channel.server_stream(stub.Generate, decode_pb2.DecodeRequest(), timeout_s=60)
    await anext(stream)
    yield
    await channel.close()


async def test_an_idle_node_is_told_to_leave_and_does(node: Node) -> None:
    result = await drain(node.address, "--wait")
    assert result.stdout.splitlines() == [
        f"decode-0 at {node.address} drains: nothing is running, it leaves now",
        "decode-0 has left",
    ]
    assert result.exit_code == 0


async def test_the_answer_counts_what_must_finish_first_and_a_second_one_says_that_it_is_one(node: Node) -> None:
    async with running_stream(node):
        first, second = await drain(node.address), await drain(node.address, "--wait")
    assert first.stdout == f"decode-0 at {node.address} drains: 1 call to finish, at most 0.5 s\n"
    assert second.stdout.splitlines() == [
        f"decode-0 at {node.address} was draining already: 1 call to finish, at most 0.5 s",
        "decode-0 has left",
    ]


async def test_a_node_that_is_not_there_cannot_be_drained() -> None:
    result = await drain("127.0.0.1:1")
    assert result.exit_code == 1
    # Without advice on how to name a router, which `drain` does not ask.
    assert result.stderr == "pdmesh: UNAVAILABLE: cannot connect to 127.0.0.1:1: Connection refused\n"


async def test_the_wait_gives_up_on_a_node_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh_cli.drain._DEPARTURE_S", 0.0)
    server = RpcServer(NodeConfig(node_id="decode-0"))
    server.add(mesh_pb2_grpc.add_NodeServicer_to_server, NodeService(Reporter(), server, [].append))
    address = f"127.0.0.1:{await server.start()}"
    await server.begin_drain()
    with pytest.raises(PdmeshError, match=r"decode-0 at .* is still there after its grace period"):
        await wait_until_left(address, "decode-0", grace_s=0.0, timeout_s=5)
    # A successor at the same address is not the node that was waited for.
    await wait_until_left(address, "decode-1", grace_s=0.0, timeout_s=5)
    await server.stop(grace_s=0)
