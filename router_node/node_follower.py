"""Follows one node: what it tells of its load and its cache goes to the router's observations.

It decides nothing and says nothing about whether a node may be used. A node of an older release cannot be followed; it
is placed on by what this router knows itself. Lives on the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc

from node_runtime.errors import InvalidRequest, NodeError, RemoteError
from node_runtime.node_updates import change_from_proto
from node_runtime.rpc import ChannelPool
from router_node.node_load import LoadReport
from router_node.observations import Observations

_log = logging.getLogger("pdmesh.router.follow")

# Each stream is renewed after this time, for no call of ours is without a deadline, and goes on where the last one
# ended.
_STREAM_S = 300.0
_UNIMPLEMENTED = "UNIMPLEMENTED"
# A node that cannot be followed may be replaced by one that can.
_OLD_RELEASE_PAUSE_S = 60.0
_MAX_PEERS = 4096
_READY = "ready"


class NodeFollower:
    """Makes a stream to each node that it is told to follow."""

    def __init__(
        self,
        channels: ChannelPool,
        observations: Observations,
        *,
        capacity_tokens: Callable[[str], int],
        interval_s: float,
        retry_interval_s: float,
        wants_prefixes: bool,
    ) -> None:
        """`capacity_tokens` gives what is known about the arena of the node at an address, 0 for nothing."""
        self._channels = channels
        self._observations = observations
        self._capacity_tokens = capacity_tokens
        self._interval_ms = round(interval_s * 1000)
        self._retry_interval_s = retry_interval_s
        self._wants_prefixes = wants_prefixes

    async def follow(self, address: str) -> None:
        """Runs until it is cancelled."""
        while True:
            pause_s = self._retry_interval_s
            try:
                await self._follow_once(address)
            except NodeError as error:
                _log.debug("%s is not followed any more: %s", address, error)
                if isinstance(error, RemoteError) and error.code_name == _UNIMPLEMENTED:
                    self._observations.forget(address)
                    pause_s = _OLD_RELEASE_PAUSE_S
            await asyncio.sleep(pause_s)

    async def _follow_once(self, address: str) -> None:
        """One stream; ends early when something was missed."""
        channel = self._channels.get(address)
        stub = channel.stub(mesh_pb2_grpc.NodeStub)
        incarnation, sequence = self._observations.index.position(address)
        request = mesh_pb2.FollowRequest(
            interval_ms=self._interval_ms,
            wants_prefixes=self._wants_prefixes,
            incarnation=incarnation,
            prefix_sequence=sequence,
        )
        async with aclosing(channel.server_stream(stub.Follow, request, timeout_s=_STREAM_S)) as updates:
            async for update in updates:
                if not self._take(address, update):
                    _log.info("%s: changes of its prefixes were missed; asking for all of them", address)
                    return

    def _take(self, address: str, update: mesh_pb2.NodeUpdate) -> bool:
        """False when something before it was missed. Raises InvalidRequest when the update makes no sense."""
        if update.HasField("status"):
            self._observations.take_report(address, report_of(update.status, self._capacity_tokens(address)))
        if not update.HasField("prefixes"):
            return True
        change = change_from_proto(update.prefixes)
        return self._observations.index.apply(address, update.incarnation, change)


def report_of(status: mesh_pb2.NodeStatus, capacity_tokens: int) -> LoadReport:
    """What a status says about load. Raises InvalidRequest when it makes no sense."""
    if len(status.peers) > _MAX_PEERS:
        raise InvalidRequest(f"peers: {len(status.peers)} given, at most {_MAX_PEERS} allowed")
    arena = status.arena
    free_tokens: int | None = None
    if arena.total_lcm_blocks and capacity_tokens:
        free_blocks = min(arena.empty_lcm_blocks + arena.cached_lcm_blocks, arena.total_lcm_blocks)
        free_tokens = capacity_tokens * free_blocks // arena.total_lcm_blocks
    return LoadReport(
        num_requests=status.num_waiting_requests + status.num_running_requests,
        free_tokens=free_tokens,
        prefill_tokens_per_s=status.prefill_tokens_per_s,
        decode_step_s=status.decode_step_ms / 1000,
        peers={peer.address: peer.state == _READY for peer in status.peers},
    )
