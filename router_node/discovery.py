"""Asks every configured node how it is and tells the pool.

Often while anything is wrong, rarely while all is well, and at once when a request failed: an idle router wakes a few
times a minute. Lives on the router's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc

from node_runtime.errors import InvalidRequest, NodeError, PeerUnavailable
from node_runtime.request_rules import check_node_id, require
from node_runtime.rpc import ChannelPool
from node_runtime.wire.adapter import adapters_from_proto
from router_node.node_pool import ROLE_BY_WIRE, ComputeRole, NodeFacts, NodePool, TokenLimits

_ANSWER_TIMEOUT_S = 3.0
# Requests that fail in a crowd wake discovery once, not a thousand times.
_MIN_INTERVAL_S = 0.1
_MAX_FINGERPRINT_CHARS = 1024


class Discovery:
    """Keeps a pool up to date while `run` runs."""

    def __init__(
        self,
        pool: NodePool,
        channels: ChannelPool,
        *,
        poll_interval_s: float,
        idle_poll_interval_s: float,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called after every round."""
        self._pool = pool
        self._channels = channels
        self._poll_interval_s = poll_interval_s
        self._idle_poll_interval_s = idle_poll_interval_s
        self._on_change = on_change
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Asks all nodes now: something went wrong."""
        self._wake.set()

    async def run(self) -> None:
        """Runs until it is cancelled. The first round comes after one interval."""
        while True:
            interval_s = self._idle_poll_interval_s if self._pool.is_settled else self._poll_interval_s
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: until Python 3.12 it forgets a cancellation that comes in the moment of its wake-up.
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()
                await asyncio.sleep(_MIN_INTERVAL_S)
            self._wake.clear()
            await self.ask_all()

    async def ask_all(self) -> None:
        """One round over all nodes at the same time; bounded by the time a node may take to answer."""
        await asyncio.gather(*(self._ask(address) for address in self._pool.addresses))
        self._on_change()

    async def _ask(self, address: str) -> None:
        channel = self._channels.get(address)
        stub = channel.stub(mesh_pb2_grpc.NodeStub)
        try:
            info = await channel.unary(stub.GetNodeInfo, mesh_pb2.GetNodeInfoRequest(), timeout_s=_ANSWER_TIMEOUT_S)
            status = await channel.unary(
                stub.GetNodeStatus, mesh_pb2.GetNodeStatusRequest(), timeout_s=_ANSWER_TIMEOUT_S
            )
            self._pool.record_answer(facts_of(address, info), is_serving=status.serving, is_draining=status.draining)
        except PeerUnavailable as error:
            self._pool.record_failure(address, error.reason)
        except NodeError as error:
            self._pool.record_failure(address, error.message)


def facts_of(address: str, info: mesh_pb2.NodeInfo) -> NodeFacts:
    """Raises InvalidRequest when the node is no compute node or tells impossible limits."""
    check_node_id(info.node_id)
    require(
        len(info.model_fingerprint) <= _MAX_FINGERPRINT_CHARS,
        f"model_fingerprint: {len(info.model_fingerprint)} characters given, at most {_MAX_FINGERPRINT_CHARS} allowed",
    )
    role = ROLE_BY_WIRE.get(info.role)
    if role is None:
        raise InvalidRequest(f"role: {info.node_id} is no compute node")
    if min(info.context_tokens, info.max_request_tokens, info.vocab_size) < 1:
        raise InvalidRequest(f"context_tokens, max_request_tokens, vocab_size: {info.node_id} tells of one below 1")
    return NodeFacts(
        address=address,
        node_id=info.node_id,
        incarnation=info.incarnation,
        role=role,
        model_fingerprint=info.model_fingerprint,
        vocab_size=info.vocab_size,
        limits=TokenLimits(context_tokens=info.context_tokens, max_request_tokens=info.max_request_tokens),
        prefills_locally=role is ComputeRole.DECODE and info.prefills_locally,
        prefix_granularity=info.prefix_granularity,
        capacity_tokens=info.capacity_tokens,
        reports_progress=role is not ComputeRole.PREFILL and info.reports_progress,
        adapters=frozenset(adapters_from_proto(info.adapters)),
    )
