"""Expansion of block tables into kernel-page tables: the single subdivision of block_granularity.

Pure functions over arrays. Ratio one is the same path: it keeps block ids and clears holes and padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cache_runtime.contract import CacheGroupContract
from cache_runtime.errors import CacheConfigError
from cache_runtime.mapping.batch_metadata import Int32Array

DUMMY_PAGE_ID = 0
"""Page that holes and padding point to: the first page of the null block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroupGeometry:
    """How a group's blocks are read by its kernel; both spans in tokens.

    Raises CacheConfigError when a kernel page does not divide the block.
    """

    group_id: str
    block_granularity: int
    kernel_page_size: int

    def __post_init__(self) -> None:
        if self.kernel_page_size < 1 or self.block_granularity % self.kernel_page_size:
            raise CacheConfigError(
                f'group "{self.group_id}": kernel_page_size {self.kernel_page_size} must divide '
                f"block_granularity {self.block_granularity}"
            )

    @classmethod
    def of(cls, group: CacheGroupContract, kernel_page_size: int) -> CacheGroupGeometry:
        return cls(
            group_id=group.group_id, block_granularity=group.block_granularity, kernel_page_size=kernel_page_size
        )

    @property
    def pages_per_block(self) -> int:
        return self.block_granularity // self.kernel_page_size


def expand_block_table(block_table: Int32Array, pages_per_block: int) -> Int32Array:
    """int32[rows, slots] of block ids -> int32[rows, slots * pages_per_block] of kernel page ids.

    Block b > 0 becomes pages [b * ratio, (b + 1) * ratio); holes (0) and padding (-1) become the dummy page.
    """
    pages = np.repeat(block_table * np.int32(pages_per_block), pages_per_block, axis=1)
    pages += np.tile(np.arange(pages_per_block, dtype=np.int32), block_table.shape[1])
    # The null block and padding expand to ids below the first page of block 1.
    pages[pages < pages_per_block] = DUMMY_PAGE_ID
    return pages
