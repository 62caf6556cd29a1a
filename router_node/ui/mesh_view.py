"""What the page shows of the nodes: each is asked when somebody looks, and not more than twice a second.

Returns plain values for JSON. Knows gRPC stubs, no HTTP. Lives on the router's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc

from node_runtime.clock import Clock
from node_runtime.errors import NodeError
from node_runtime.rpc import ChannelPool, NodeReporter
from router_node.node_pool import NodePool

JsonValue = str | int | float | bool | None | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
JsonObject = Mapping[str, JsonValue]

_ANSWER_TIMEOUT_S: Final = 1.0
_FRESH_S: Final = 0.5
_MAX_SHOWN_PEERS: Final = 64


class MeshView:
    """The router and its nodes at this moment."""

    def __init__(self, pool: NodePool, channels: ChannelPool, reporter: NodeReporter, clock: Clock) -> None:
        """`reporter` is the router's own."""
        self._pool = pool
        self._channels = channels
        self._reporter = reporter
        self._clock = clock
        self._seen: JsonObject = {}
        self._seen_at_s = -_FRESH_S
        self._looking: asyncio.Task[JsonObject] | None = None

    async def look(self) -> JsonObject:
        """What was seen a moment ago, or what is seen now. Looks of several callers are one."""
        if self._clock.now_s() - self._seen_at_s < _FRESH_S:
            return self._seen
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(self._forget)
        return await asyncio.shield(self._looking)

    def _forget(self, task: asyncio.Task[JsonObject]) -> None:
        self._looking = None

    async def _look(self) -> JsonObject:
        conditions = self._pool.conditions()
        answers = await asyncio.gather(*(self._ask(condition.address) for condition in conditions))
        nodes = [
            {
                "address": condition.address,
                "role": condition.role.value,
                "state": condition.state.value,
                "detail": condition.detail,
                **answer,
            }
            for condition, answer in zip(conditions, answers, strict=True)
        ]
        info, status = self._reporter.info(), await self._reporter.status()
        router = {
            "node_id": info.node_id,
            "version": info.version,
            **_gauges(status),
            "num_retries": status.num_retries,
        }
        self._seen = {"router": router, "nodes": nodes}
        self._seen_at_s = self._clock.now_s()
        return self._seen

    async def _ask(self, address: str) -> JsonObject:
        """What a node tells about itself; nothing when it does not answer."""
        try:
            channel = self._channels.get(address)
            stub = channel.stub(mesh_pb2_grpc.NodeStub)
            info, status = await asyncio.gather(
                channel.unary(stub.GetNodeInfo, mesh_pb2.GetNodeInfoRequest(), timeout_s=_ANSWER_TIMEOUT_S),
                channel.unary(stub.GetNodeStatus, mesh_pb2.GetNodeStatusRequest(), timeout_s=_ANSWER_TIMEOUT_S),
            )
        except NodeError as error:
            return {"error": error.message}
        return {
            "node_id": info.node_id,
            "device": info.device,
            "model": info.model,
            **_gauges(status),
            "num_steps": status.num_steps,
            "num_handoffs": status.num_handoffs,
            "num_retractions": status.num_retractions,
            "arena": _arena(status.arena),
            "peers": [_peer(peer) for peer in status.peers[:_MAX_SHOWN_PEERS]],
        }


def _gauges(status: mesh_pb2.NodeStatus) -> JsonObject:
    return {
        "is_serving": status.serving,
        "is_draining": status.draining,
        "num_waiting": status.num_waiting_requests,
        "num_running": status.num_running_requests,
    }


def _arena(arena: mesh_pb2.ArenaStatus) -> JsonObject:
    """In LCM blocks."""
    return {
        "total": arena.total_lcm_blocks,
        "empty": arena.empty_lcm_blocks,
        "active": arena.active_lcm_blocks,
        "cached": arena.cached_lcm_blocks,
        "quarantined": arena.quarantined_lcm_blocks,
        "groups": [
            {
                "group_id": group.group_id,
                "lcm_blocks": group.lcm_blocks,
                "cached_lcm_blocks": group.cached_lcm_blocks,
                "taken_blocks": group.taken_blocks,
            }
            for group in arena.groups
        ],
    }


def _peer(peer: mesh_pb2.PeerStatus) -> JsonObject:
    return {
        "node_id": peer.node_id,
        "address": peer.address,
        "state": peer.state,
        "detail": peer.detail,
        "data_plane": peer.data_plane,
    }
