"""Calls over the simulated network fail as calls over gRPC do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from pdmesh.v1 import decode_pb2, decode_pb2_grpc

from node_runtime.config import NodeConfig
from node_runtime.errors import DeadlineExceeded, InvalidRequest, NodeError, PeerUnavailable, RemoteError
from node_runtime.rpc import RpcServer, connect
from node_runtime.rpc.loopback import LoopbackTransport
from simulation.dice import Dice
from simulation.kernel import Process, World
from simulation.network import Network


class Counter:
    """Servicer of Decode: a response per second; its requests say how many, and 0 is refused."""

    def __init__(self) -> None:
        self.num_cancelled = 0

    async def Generate(self, request: decode_pb2.DecodeRequest, context: object) -> AsyncIterator[object]:
        if not request.max_tokens:
            raise InvalidRequest("max_tokens: 0 given")
        try:
            for _ in range(request.max_tokens):
                await asyncio.sleep(1.0)
                yield decode_pb2.DecodeResponse()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


class Pair:
    """A server and a client on a network."""

    def __init__(self) -> None:
        self.world = World()
        self.network = Network(Dice(1), 0.0)
        self.server = Process(self.world, "server", self._fail)
        self.client = Process(self.world, "client", self._fail)
        self.servicer = Counter()
        self.answers: list[object] = []
        self.error: NodeError | None = None
        self.ended_at_s = 0.0

    def _fail(self, message: str, error: BaseException | None) -> None:
        raise AssertionError(f"{message}: {error!r}")

    def serve(self) -> None:
        async def start() -> None:
            transport = LoopbackTransport(self.network.wire_of(self.server))
            server = RpcServer(NodeConfig(host="server", port=7000), transport=transport)
            server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self.servicer)
            await server.start()

        self.server.create_task(start())
        self.world.run_until(self.world.now_s + 0.1)

    def ask(self, max_tokens: int, *, timeout_s: float = 60.0) -> asyncio.Task[None]:
        async def read() -> None:
            transport = LoopbackTransport(self.network.wire_of(self.client))
            channel = connect("server:7000", max_message_bytes=1 << 20, transport=transport)
            stub = channel.stub(decode_pb2_grpc.DecodeStub)
            request = decode_pb2.DecodeRequest(max_tokens=max_tokens)
            try:
                async with aclosing(channel.server_stream(stub.Generate, request, timeout_s=timeout_s)) as responses:
                    async for response in responses:
                        self.answers.append(response)
            except NodeError as error:
                self.error = error
            self.ended_at_s = self.world.now_s

        return self.client.create_task(read())


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_stream_arrives_whole_and_in_order(pair: Pair) -> None:
    pair.serve()
    pair.ask(3)
    pair.world.run_until(10.0)
    assert len(pair.answers) == 3
    assert pair.error is None


def test_nobody_listening_means_unavailable_at_once(pair: Pair) -> None:
    pair.ask(3)
    pair.world.run_until(10.0)
    assert isinstance(pair.error, PeerUnavailable)
    assert pair.ended_at_s < 0.1


def test_a_refusal_arrives_with_its_status(pair: Pair) -> None:
    pair.serve()
    pair.ask(0)
    pair.world.run_until(10.0)
    assert isinstance(pair.error, RemoteError)
    assert pair.error.code_name == "INVALID_ARGUMENT"


def test_a_deadline_ends_the_call_on_both_sides(pair: Pair) -> None:
    pair.serve()
    pair.ask(30, timeout_s=2.5)
    pair.world.run_until(10.0)
    assert isinstance(pair.error, DeadlineExceeded)
    assert len(pair.answers) == 2
    assert pair.servicer.num_cancelled == 1


def test_a_client_that_leaves_cancels_the_handler(pair: Pair) -> None:
    pair.serve()
    task = pair.ask(30)
    pair.world.run_until(3.0)
    pair.client.call_soon(task.cancel)
    pair.world.run_until(4.0)
    assert pair.servicer.num_cancelled == 1


def test_a_killed_server_is_noticed_at_once(pair: Pair) -> None:
    pair.serve()
    pair.ask(30)
    pair.world.run_until(3.0)
    pair.server.kill()
    pair.network.drop_process(pair.server)
    pair.world.run_until(10.0)
    assert isinstance(pair.error, PeerUnavailable)
    assert pair.ended_at_s < 3.1


@pytest.mark.parametrize("way", [("client", "server"), ("server", "client")])
def test_a_partition_in_one_way_is_noticed_by_keepalive(pair: Pair, way: tuple[str, str]) -> None:
    pair.serve()
    pair.ask(30)
    pair.world.run_until(3.0)
    pair.network.block(*way)
    pair.world.run_until(20.0)
    assert isinstance(pair.error, PeerUnavailable)
    assert 8.0 <= pair.ended_at_s <= 11.1
    pair.network.unblock(*way)
    pair.world.run_until(40.0)
    assert pair.servicer.num_cancelled == 1


def test_a_short_partition_delays_and_loses_nothing(pair: Pair) -> None:
    pair.serve()
    pair.ask(5)
    pair.world.run_until(2.5)
    pair.network.block("server", "client")
    pair.world.run_until(6.5)
    assert len(pair.answers) == 2
    pair.network.unblock("server", "client")
    pair.world.run_until(10.0)
    assert len(pair.answers) == 5
    assert pair.error is None
