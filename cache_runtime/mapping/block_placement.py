"""BlockPlacement: which context rank holds a block of a sharded group, and under which id.

The scheduler hands out virtual ids, the same to every rank; block v lies on shard (v - 1) mod shard_count, as block
(v - 1) // shard_count + 1 of that rank's arena. The null block 0 lies nowhere. The one spelling of these formulas on
this side; the scheduler balances the same shards. A replicated group is the same path with one shard. Pure functions
over arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from cache_runtime.contract import CacheGroupContract, CacheRuntimeContract
from cache_runtime.errors import BlockIdError, CacheConfigError
from cache_runtime.mapping.batch_metadata import HOLE_BLOCK_ID, Int32Array
from cache_runtime.recipes.spec import CacheFamily, CacheRetention

NO_SHARD = -1
"""Shard of the null block and of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlacement:
    """One group as one rank sees it: it holds the blocks of `shard`. `num_virtual_blocks` includes the null block.

    Raises CacheConfigError for a shard the group does not have.
    """

    group_id: str
    shard_count: int
    shard: int
    num_virtual_blocks: int

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.shard_count:
            raise CacheConfigError(f'group "{self.group_id}": shard {self.shard} is outside [0, {self.shard_count})')

    @property
    def is_sharded(self) -> bool:
        return self.shard_count > 1

    def shards(self, virtual_ids: Int32Array) -> Int32Array:
        """The shard of each id, NO_SHARD for the null block and padding."""
        return np.where(virtual_ids > HOLE_BLOCK_ID, (virtual_ids - 1) % self.shard_count, NO_SHARD).astype(np.int32)

    def physical_table(self, virtual_table: Int32Array) -> Int32Array:
        """The table in this rank's block ids; holes where a slot has no block, or has one that lies elsewhere."""
        physical = (virtual_table - 1) // self.shard_count + 1
        return np.where(self.shards(virtual_table) == self.shard, physical, HOLE_BLOCK_ID).astype(np.int32)

    def held_blocks(self, virtual_ids: npt.NDArray[np.int32]) -> Int32Array:
        """Ids on this rank of those of the blocks that it holds, in their order.

        Raises BlockIdError when any of the ids, wherever it lies, is outside the group.
        """
        ids = np.asarray(virtual_ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.num_virtual_blocks:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise BlockIdError(
                f'group "{self.group_id}": block id {bad} is outside [0, {self.num_virtual_blocks}), the blocks of '
                f"shard_count {self.shard_count}"
            )
        physical = self.physical_table(ids)
        return physical[physical > HOLE_BLOCK_ID]


def place_blocks(
    contract: CacheRuntimeContract, *, context_rank: int, num_context_ranks: int
) -> Mapping[str, BlockPlacement]:
    """Every group as rank `context_rank` of `num_context_ranks` sees it, by group id.

    Raises CacheConfigError for a rank outside the ranks, a shard count that is not theirs, and a sharded group that
    somebody must read whole: states, and rows that expire.
    """
    if not 0 <= context_rank < num_context_ranks:
        raise CacheConfigError(f"context_rank {context_rank} is outside [0, {num_context_ranks})")
    return MappingProxyType(
        {group.group_id: _place_group(group, context_rank, num_context_ranks) for group in contract.groups}
    )


def _place_group(group: CacheGroupContract, context_rank: int, num_context_ranks: int) -> BlockPlacement:
    spec = group.spec
    if spec.shard_count not in (1, num_context_ranks):
        raise CacheConfigError(
            f'group "{spec.group_id}": shard_count {spec.shard_count} is neither 1 nor the number of context ranks, '
            f"{num_context_ranks}"
        )
    keeps_all_rows = spec.family is CacheFamily.HISTORY and spec.retention is CacheRetention.FULL_HISTORY
    if spec.shard_count > 1 and not keeps_all_rows:
        raise CacheConfigError(
            f'group "{spec.group_id}": shard_count {spec.shard_count} needs a full-history group of rows, this is '
            f"{spec.family} with retention {spec.retention}"
        )
    return BlockPlacement(
        group_id=spec.group_id,
        shard_count=spec.shard_count,
        shard=context_rank if spec.shard_count > 1 else 0,
        num_virtual_blocks=group.num_virtual_blocks,
    )
