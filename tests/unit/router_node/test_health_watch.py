"""The router hears of a node that drains, dies or comes back without waiting for its next round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc
from unit.router_node.fakes import CONTEXT_TOKENS, FINGERPRINT, VOCAB_SIZE, FakeNode, StartNode, StartRouter

from node_runtime.config import NodeConfig
from node_runtime.rpc import ChannelPool, NodeService, RpcServer
from router_node.health_watch import HealthWatch

FUSED = mesh_pb2.NODE_ROLE_FUSED


class Reporter:
    """A fused node that serves."""

    def info(self) -> mesh_pb2.NodeInfo:
        return mesh_pb2.NodeInfo(
            node_id="fused-0",
            incarnation=3,
            role=FUSED,
            model_fingerprint=FINGERPRINT,
            vocab_size=VOCAB_SIZE,
            context_tokens=CONTEXT_TOKENS,
            max_request_tokens=CONTEXT_TOKENS,
        )

    async def status(self) -> mesh_pb2.NodeStatus:
        return mesh_pb2.NodeStatus(serving=True)

    async def clear_cache(self) -> bool:
        return True

    @property
    def prefix_feed(self) -> None:
        return None


async def serve(port: int = 0) -> RpcServer:
    """A serving node with the services that every node has."""
    server = RpcServer(NodeConfig(node_id="fused-0", port=port))
    server.add(mesh_pb2_grpc.add_NodeServicer_to_server, NodeService(Reporter(), server, [].append))
    await server.start()
    server.set_serving(True)
    return server


@pytest.fixture
async def channels() -> AsyncIterator[ChannelPool]:
    channels = ChannelPool(max_message_bytes=1 << 20)
    yield channels
    await channels.close()


async def test_a_drain_a_departure_and_a_return_are_all_heard(channels: ChannelPool) -> None:
    server = await serve()
    heard: asyncio.Queue[None] = asyncio.Queue()
    watch = HealthWatch(channels, retry_interval_s=0.01, on_change=lambda: heard.put_nowait(None))
    running = asyncio.create_task(watch.watch(server.advertised_address))
    await asyncio.wait_for(heard.get(), 10)
    await server.begin_drain()
    await asyncio.wait_for(heard.get(), 10)
    await server.stop(0)
    await asyncio.wait_for(heard.get(), 10)
    again = await serve(server.port)
    await asyncio.wait_for(heard.get(), 10)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await again.stop(0)


async def test_a_node_that_tells_no_health_is_left_to_the_polling(start_node: StartNode, channels: ChannelPool) -> None:
    node: FakeNode = await start_node(FUSED, "old-release")
    watch = HealthWatch(channels, retry_interval_s=0.01, on_change=pytest.fail)
    await asyncio.wait_for(watch.watch(node.address), 10)


async def test_a_router_leaves_a_draining_node_out_long_before_its_next_round(start_router: StartRouter) -> None:
    server = await serve()
    node = FakeNode(role=FUSED, node_id="fused-0", address=server.advertised_address)
    running = await start_router(node, idle_poll_interval_s=600)

    async def peer_state() -> str:
        status = await running.node.GetNodeStatus(mesh_pb2.GetNodeStatusRequest(), timeout=10)
        return status.peers[0].state

    assert await peer_state() == "ready"
    await server.begin_drain()
    async with asyncio.timeout(10):
        while await peer_state() == "ready":
            await asyncio.sleep(0.01)
    await server.stop(0)
