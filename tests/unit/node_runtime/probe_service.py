"""A scripted service for the RPC tests: pdmesh.v1 servicers whose behaviour each test supplies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdmesh.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    handoff_pb2,
    mesh_pb2,
    mesh_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

from node_runtime.config import NodeConfig
from node_runtime.rpc import Channel, NodeService, RpcContext, RpcServer, Telemetry, connect

GenerateBody = Callable[[decode_pb2.DecodeRequest, RpcContext], AsyncIterator[decode_pb2.DecodeResponse]]
HandoffBody = Callable[
    [AsyncIterator[handoff_pb2.HandoffRequest], RpcContext], AsyncIterator[handoff_pb2.HandoffResponse]
]


class ScriptedDecode:
    """Servicer of pdmesh.v1.Decode with an exchangeable body that tells when it starts and how it ends."""

    def __init__(self, body: GenerateBody) -> None:
        self._body = body
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.was_cancelled = False

    async def Generate(
        self, request: decode_pb2.DecodeRequest, context: RpcContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        self.started.set()
        try:
            async for response in self._body(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.was_cancelled = True
            raise
        finally:
            self.ended.set()


class ScriptedPrefill:
    """Servicer of pdmesh.v1.Prefill with an exchangeable Handoff."""

    def __init__(self, body: HandoffBody) -> None:
        self._body = body

    async def Bootstrap(
        self, request: prefill_pb2.BootstrapRequest, context: RpcContext
    ) -> prefill_pb2.BootstrapResponse:
        return prefill_pb2.BootstrapResponse(node_id="probe")

    async def Handoff(
        self, requests: AsyncIterator[handoff_pb2.HandoffRequest], context: RpcContext
    ) -> AsyncIterator[handoff_pb2.HandoffResponse]:
        async for response in self._body(requests, context):
            yield response


class FixedReporter:
    """A NodeReporter with constant answers."""

    def __init__(self, *, is_idle: bool = True) -> None:
        self._is_idle = is_idle
        self.prefix_feed = None

    def info(self) -> mesh_pb2.NodeInfo:
        return mesh_pb2.NodeInfo(node_id="probe", role=mesh_pb2.NODE_ROLE_DECODE)

    async def status(self) -> mesh_pb2.NodeStatus:
        return mesh_pb2.NodeStatus(serving=True, num_steps=7)

    async def clear_cache(self) -> bool:
        return self._is_idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A running server and a channel to it."""

    server: RpcServer
    channel: Channel
    address: str
    drains: list[str]

    @property
    def decode(self) -> decode_pb2_grpc.DecodeAsyncStub:
        return self.channel.stub(decode_pb2_grpc.DecodeStub)

    @property
    def prefill(self) -> prefill_pb2_grpc.PrefillAsyncStub:
        return self.channel.stub(prefill_pb2_grpc.PrefillStub)

    @property
    def node(self) -> mesh_pb2_grpc.NodeAsyncStub:
        return self.channel.stub(mesh_pb2_grpc.NodeStub)


def tokens(*token_ids: int) -> decode_pb2.DecodeResponse:
    response = decode_pb2.DecodeResponse()
    for token_id in token_ids:
        response.tokens.tokens.add(token_id=token_id)
    return response


async def two_responses(
    request: decode_pb2.DecodeRequest, context: RpcContext
) -> AsyncIterator[decode_pb2.DecodeResponse]:
    yield tokens(1)
    yield tokens(2)


async def one_response_then_never(
    request: decode_pb2.DecodeRequest, context: RpcContext
) -> AsyncIterator[decode_pb2.DecodeResponse]:
    yield tokens(1)
    await asyncio.Event().wait()


@asynccontextmanager
async def serving(
    *,
    decode: ScriptedDecode | None = None,
    prefill: ScriptedPrefill | None = None,
    reporter: FixedReporter | None = None,
    config: NodeConfig | None = None,
    telemetry: Telemetry | None = None,
    client_max_message_bytes: int = 64 * 2**20,
) -> AsyncIterator[Probe]:
    """Serves on a free port for the time of the block."""
    server = RpcServer(config or NodeConfig(node_id="probe"), telemetry or Telemetry.off())
    drains: list[str] = []
    server.add(
        mesh_pb2_grpc.add_NodeServicer_to_server, NodeService(reporter or FixedReporter(), server, drains.append)
    )
    if decode is not None:
        server.add(decode_pb2_grpc.add_DecodeServicer_to_server, decode)
    if prefill is not None:
        server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, prefill)
    port = await server.start()
    channel = connect(f"127.0.0.1:{port}", max_message_bytes=client_max_message_bytes)
    try:
        yield Probe(server=server, channel=channel, address=f"127.0.0.1:{port}", drains=drains)
    finally:
        await channel.close()
        await server.stop(0)
