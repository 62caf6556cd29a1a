"""What a node tells about itself, as metrics: one table from NodeStatus to instruments.

Looks at the node once a second, so that readers, which have threads of their own, find a recent status without asking
the event loop. Started only where somebody reads metrics.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pdmesh.v1 import mesh_pb2

from node_runtime.rpc.metrics import Labels, Metrics

INTERVAL_S: Final = 1.0
_PEER_STATES: Final = ("ready", "connecting", "suspect", "draining")
_ARENA_STATES: Final = ("empty", "active", "cached", "quarantined")

_log = logging.getLogger("pdmesh.telemetry")

Values = Iterable[tuple[float, Labels]]


@dataclass(frozen=True, slots=True)
class _Instrument:
    name: str
    unit: str
    description: str
    read: Callable[[mesh_pb2.NodeStatus], Values]


def _one(value: float) -> Values:
    # OTLP refuses booleans, and with them everything that is sent along.
    return [(int(value) if isinstance(value, bool) else value, {})]


def _arena_blocks(status: mesh_pb2.NodeStatus) -> Values:
    """Nothing on a node without an arena."""
    arena = status.arena
    if not arena.total_lcm_blocks:
        return []
    return [(getattr(arena, f"{state}_lcm_blocks"), {"state": state}) for state in _ARENA_STATES]


def _group_blocks(status: mesh_pb2.NodeStatus) -> Values:
    return [(group.lcm_blocks, {"group": group.group_id}) for group in status.arena.groups]


def _peers(status: mesh_pb2.NodeStatus) -> Values:
    counts = Counter(peer.state for peer in status.peers)
    return [(counts[state], {"state": state}) for state in _PEER_STATES]


_GAUGES: Final = (
    _Instrument("pdmesh.serving", "", "1 while the node takes new requests, else 0", lambda s: _one(s.serving)),
    _Instrument("pdmesh.draining", "", "1 once the node was told to leave", lambda s: _one(s.draining)),
    _Instrument(
        "pdmesh.requests.running",
        "{request}",
        "requests that hold a place",
        lambda s: _one(s.num_running_requests),
    ),
    _Instrument(
        "pdmesh.requests.waiting",
        "{request}",
        "requests that wait for a place",
        lambda s: _one(s.num_waiting_requests),
    ),
    _Instrument(
        "pdmesh.handoffs.active",
        "{handoff}",
        "handoffs under way or with quarantined blocks",
        lambda s: _one(s.num_handoffs),
    ),
    _Instrument("pdmesh.arena.blocks", "{block}", "LCM blocks of the arena by what holds them", _arena_blocks),
    _Instrument("pdmesh.arena.group_blocks", "{block}", "LCM blocks of the arena by cache group", _group_blocks),
    _Instrument("pdmesh.peers", "{peer}", "other nodes by the state of the link to them", _peers),
)
_COUNTERS: Final = (
    _Instrument("pdmesh.steps", "{step}", "forward passes", lambda s: _one(s.num_steps)),
    _Instrument(
        "pdmesh.retractions",
        "{retraction}",
        "requests that gave their memory to another one and went on later",
        lambda s: _one(s.num_retractions),
    ),
    _Instrument(
        "pdmesh.handoffs.verified",
        "{handoff}",
        "handoffs compared with the checksums of their sender",
        lambda s: _one(s.num_verified_handoffs),
    ),
    _Instrument(
        "pdmesh.handoffs.damaged",
        "{handoff}",
        "verified handoffs whose cache was another than the sender's",
        lambda s: _one(s.num_damaged_handoffs),
    ),
    _Instrument(
        "pdmesh.local_prefills",
        "{request}",
        "prompts that a decode node computed itself",
        lambda s: _one(s.num_local_prefills),
    ),
    _Instrument("pdmesh.retries", "{attempt}", "attempts beyond the first", lambda s: _one(s.num_retries)),
    _Instrument("pdmesh.hedges", "{attempt}", "second attempts beside slow first ones", lambda s: _one(s.num_hedges)),
    _Instrument(
        "pdmesh.hedges.won", "{attempt}", "hedges that were first to give a token", lambda s: _one(s.num_won_hedges)
    ),
    _Instrument(
        "pdmesh.runs.refused",
        "{run}",
        "writes that arrived after their grant had ended and were dropped",
        lambda s: _one(s.num_refused_runs),
    ),
)


class StatusMetrics:
    """Keeps the last status and shows it to `metrics`. Lives on the event loop; readers only see whole statuses."""

    def __init__(
        self,
        metrics: Metrics,
        read_status: Callable[[], Awaitable[mesh_pb2.NodeStatus]],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`interval_s`: time between two looks."""
        self._interval_s = interval_s
        self._is_read = metrics.is_read
        self._read_status = read_status
        self._last: mesh_pb2.NodeStatus | None = None
        self._looking: asyncio.Task[None] | None = None
        if not self._is_read:
            return
        for instrument in _GAUGES:
            metrics.observe_gauge(
                instrument.name, instrument.unit, instrument.description, self._reading(instrument.read)
            )
        for instrument in _COUNTERS:
            metrics.observe_counter(
                instrument.name, instrument.unit, instrument.description, self._reading(instrument.read)
            )

    def start(self) -> None:
        """Begins to look; does nothing where nobody reads."""
        if self._is_read:
            self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Stops looking. Copes with never having begun. Idempotent."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            try:
                self._last = await self._read_status()
            except Exception:
                # Old values would look like those of a node that stands still.
                self._last = None
                _log.exception("the status of this node cannot be read")
            await asyncio.sleep(self._interval_s)

    def _reading(self, read: Callable[[mesh_pb2.NodeStatus], Values]) -> Callable[[], Values]:
        def values() -> Values:
            status = self._last
            return [] if status is None else read(status)

        return values
