"""ForwardContext: what all layers of one forward share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cache_runtime.mapping.router import RoutedBatch
from cache_runtime.pools.cache_pools import CachePools
from model_runtime.forward_batch import ForwardBatch
from model_runtime.kernels.interface import Kernels
from model_runtime.rank_group import RankGroup, SingleRank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardContext:
    """The batch, where its rows and states lie in the arena, and the kernels that read them.

    `ranks` are those that hold the blocks of sharded groups together.

    Every layer that deposits anything in the cache tells `on_stored(layer)` once all of it, rows or states, is there.
    """

    batch: ForwardBatch
    routed: RoutedBatch
    pools: CachePools
    kernels: Kernels
    on_stored: Callable[[int], None]
    ranks: RankGroup = field(default_factory=SingleRank)
