"""The parts of a mesh around the router under test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from pdmesh.v1 import inference_pb2_grpc, mesh_pb2, mesh_pb2_grpc
from support.byte_tokenizer import make_tokenizer
from support.endings import ended
from unit.router_node.fakes import (
    FakeNode,
    RunningRouter,
    StartNode,
    StartRouter,
    finish_event,
    tokens_event,
)

from model_runtime.text.tokenizer import Tokenizer
from node_runtime.rpc import Telemetry
from router_node.config import RouterConfig
from router_node.server import Router


@pytest.fixture
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture
async def start_node() -> AsyncIterator[StartNode]:
    nodes: list[FakeNode] = []

    async def start(role: mesh_pb2.NodeRole, node_id: str, **fields: object) -> FakeNode:
        node = FakeNode(role=role, node_id=node_id, **fields)  # type: ignore[arg-type]
        nodes.append(node)
        return await node.start()

    yield start
    for node in nodes:
        await ended(node.stop(), node.node_id)


@pytest.fixture
async def start_router(tokenizer: Tokenizer) -> AsyncIterator[StartRouter]:
    routers: list[Router] = []
    channels: list[grpc.aio.Channel] = []

    own_tokenizer = tokenizer

    async def start(
        *nodes: FakeNode,
        telemetry: Telemetry | None = None,
        tokenizer: Tokenizer = own_tokenizer,
        **settings: object,
    ) -> RunningRouter:
        roles = {
            "prefill": mesh_pb2.NODE_ROLE_PREFILL,
            "decode": mesh_pb2.NODE_ROLE_DECODE,
            "fused": mesh_pb2.NODE_ROLE_FUSED,
        }
        listed = {name: tuple(node.address for node in nodes if node.role == role) for name, role in roles.items()}
        values = {"model": "tiny.gguf", "idle_poll_interval_s": 600, "drain_grace_s": 0, **listed, **settings}
        router = Router(
            RouterConfig.model_validate(values),
            tokenizer,
            telemetry=telemetry or Telemetry.off(),
            on_fatal=pytest.fail,
            on_drain=pytest.fail,
        )
        routers.append(router)
        await router.start()
        channel = grpc.aio.insecure_channel(router.address)
        channels.append(channel)
        stub, node = inference_pb2_grpc.InferenceStub(channel), mesh_pb2_grpc.NodeStub(channel)
        return RunningRouter(router=router, channel=channel, stub=stub, node=node)

    yield start
    for channel in channels:
        await ended(channel.close(), "the channel of a client")
    for router in routers:
        await ended(router.stop(), "a router")


@pytest.fixture
async def prefill(start_node: StartNode) -> FakeNode:
    return await start_node(mesh_pb2.NODE_ROLE_PREFILL, "prefill-1")


@pytest.fixture
async def decode(start_node: StartNode) -> FakeNode:
    return await start_node(mesh_pb2.NODE_ROLE_DECODE, "decode-1", script=[tokens_event("ab"), finish_event()])
