"""Discovery turns what nodes answer into what the pool knows."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from pdmesh.v1 import mesh_pb2
from unit.router_node.fakes import VOCAB_SIZE, FakeNode, StartNode

from node_runtime.rpc import ChannelPool
from router_node.discovery import Discovery
from router_node.node_pool import ComputeRole, NodePool

FUSED = mesh_pb2.NODE_ROLE_FUSED


@pytest.fixture
async def channels() -> AsyncIterator[ChannelPool]:
    channels = ChannelPool(max_message_bytes=1 << 20)
    yield channels
    await channels.close()


def _discovery(pool: NodePool, channels: ChannelPool, changed: asyncio.Event) -> Discovery:
    return Discovery(pool, channels, poll_interval_s=600, idle_poll_interval_s=600, on_change=changed.set)


def _pool(*nodes: FakeNode) -> NodePool:
    return NodePool({ComputeRole.FUSED: [node.address for node in nodes]}, vocab_size=VOCAB_SIZE)


async def test_a_round_asks_every_node(start_node: StartNode, channels: ChannelPool) -> None:
    nodes = [await start_node(FUSED, "f-1", max_request_tokens=20), await start_node(FUSED, "f-2", serving=False)]
    pool, changed = _pool(*nodes), asyncio.Event()
    await _discovery(pool, channels, changed).ask_all()
    (usable,) = pool.usable(ComputeRole.FUSED)
    assert (usable.facts.node_id, usable.facts.incarnation, usable.facts.limits.max_request_tokens) == ("f-1", 7, 20)
    assert changed.is_set()


async def test_a_node_that_cannot_be_reached_or_makes_no_sense_is_left_out_with_its_reason(
    start_node: StartNode, channels: ChannelPool
) -> None:
    router = await start_node(mesh_pb2.NODE_ROLE_ROUTER, "r-1")
    empty = await start_node(FUSED, "f-1", max_request_tokens=0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        absent = FakeNode(role=FUSED, node_id="absent", address=f"127.0.0.1:{probe.getsockname()[1]}")
        pool = _pool(router, empty, absent)
        await _discovery(pool, channels, asyncio.Event()).ask_all()
    assert not pool.is_ready
    details = [condition.detail for condition in pool.conditions()]
    assert "r-1 is no compute node" in details[0]
    assert "f-1 tells of one below 1" in details[1]
    assert "refused" in details[2].lower()


async def test_waking_asks_at_once_instead_of_after_the_interval(start_node: StartNode, channels: ChannelPool) -> None:
    pool, changed = _pool(await start_node(FUSED, "f-1")), asyncio.Event()
    discovery = _discovery(pool, channels, changed)
    running = asyncio.create_task(discovery.run())
    discovery.wake()
    await changed.wait()
    assert pool.is_settled
    running.cancel()


async def test_a_discovery_that_is_stopped_in_the_moment_of_its_wake_up_stops(channels: ChannelPool) -> None:
    discovery = _discovery(_pool(), channels, asyncio.Event())
    running = asyncio.create_task(discovery.run())
    await asyncio.sleep(0)
    discovery.wake()
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=10)
    assert done
    assert running.cancelled()
