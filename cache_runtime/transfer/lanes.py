"""Lanes: which tensor ranks of one node write to which of another, and what of a block each of them writes.

Pure, like the planner that turns a lane and a list of blocks into runs. Over all lanes to a rank every byte of a block
is written once, whatever the numbers of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cache_runtime.recipes.partition import TensorRank

from .partition import Strips, plan_strips
from .schema import LogicalManifest, RankPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLane:
    """One rank that writes to one rank of a peer."""

    source: RankPlacement
    target: RankPlacement
    # Of a block of each field; None: all of it.
    strips: Mapping[str, Strips] | None


class LanePlanner:
    """Lanes from the ranks of one node. Thread-safe; keeps what depends on nothing but the numbers of ranks."""

    def __init__(self, logical: LogicalManifest, sources: Sequence[RankPlacement]) -> None:
        self._logical = logical
        self._sources = tuple(sources)
        self._strips_of: dict[tuple[TensorRank, TensorRank], Mapping[str, Strips]] = {}

    def lanes_to(self, targets: Sequence[RankPlacement]) -> tuple[RankLane, ...]:
        """By source, then target. `targets`: all ranks of a peer; as many of them have the same heads, rank by rank."""
        if len(targets) == len(self._sources):
            pairs = zip(self._sources, targets, strict=True)
            return tuple(RankLane(source=source, target=target, strips=None) for source, target in pairs)
        lanes = []
        for source, target in itertools.product(self._sources, targets):
            strips = self._strips(source.tensor_rank, target.tensor_rank)
            if any(len(rows) for rows in strips.values()):
                lanes.append(RankLane(source=source, target=target, strips=strips))
        return tuple(lanes)

    def _strips(self, source: TensorRank, target: TensorRank) -> Mapping[str, Strips]:
        if (source, target) not in self._strips_of:
            self._strips_of[source, target] = plan_strips(self._logical, source, target)
        return self._strips_of[source, target]
