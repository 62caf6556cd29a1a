"""Expansion of block tables into kernel-page tables: the single subdivision of block_granularity.

Pure functions over arrays. Ratio one is the same path: it clears holes and padding and keeps ids that are a page apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cache_runtime.contract import CacheGroupContract
from cache_runtime.errors import CacheConfigError
from cache_runtime.mapping.batch_metadata import Int32Array

DUMMY_PAGE_ID = 0
"""Page that holes and padding point to: the first page of the null block."""

ABSENT_PAGE_ID = -1
"""Page of a sharded group that is not on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroupGeometry:
    """How a group's blocks are read by its kernel; both spans in tokens, one row per token.

    `block_stride_rows` is the distance of neighbouring blocks, at least a block's rows. Raises CacheConfigError when a
    kernel page divides neither block nor distance.
    """

    group_id: str
    block_granularity: int
    kernel_page_size: int
    block_stride_rows: int

    def __post_init__(self) -> None:
        if self.kernel_page_size < 1 or self.block_granularity % self.kernel_page_size:
            raise CacheConfigError(
                f'group "{self.group_id}": kernel_page_size {self.kernel_page_size} must divide '
                f"block_granularity {self.block_granularity}"
            )
        if self.block_stride_rows < self.block_granularity or self.block_stride_rows % self.kernel_page_size:
            raise CacheConfigError(
                f'group "{self.group_id}": block_stride_rows {self.block_stride_rows} must be at least '
                f"block_granularity {self.block_granularity} and a multiple of kernel_page_size {self.kernel_page_size}"
            )

    @classmethod
    def of(cls, group: CacheGroupContract, kernel_page_size: int) -> CacheGroupGeometry:
        """Raises CacheConfigError also for a group without one row per token."""
        if group.block_stride_rows is None or group.spec.entry_stride_tokens != 1:
            raise CacheConfigError(
                f'group "{group.group_id}": entry_stride_tokens {group.spec.entry_stride_tokens} is not supported by '
                "paged attention, only 1"
            )
        return cls(
            group_id=group.group_id,
            block_granularity=group.block_granularity,
            kernel_page_size=kernel_page_size,
            block_stride_rows=group.block_stride_rows,
        )

    @property
    def pages_per_block(self) -> int:
        return self.block_granularity // self.kernel_page_size

    @property
    def block_stride_pages(self) -> int:
        """Kernel pages from one block to the next."""
        return self.block_stride_rows // self.kernel_page_size


def expand_block_table(block_table: Int32Array, pages_per_block: int, block_stride_pages: int) -> Int32Array:
    """int32[rows, slots] of block ids -> int32[rows, slots * pages_per_block] of kernel page ids.

    Block b > 0 becomes the `pages_per_block` pages from b * block_stride_pages on; holes (0) and padding (-1) become
    the dummy page.
    """
    pages = np.repeat(block_table * np.int32(block_stride_pages), pages_per_block, axis=1)
    pages += np.tile(np.arange(pages_per_block, dtype=np.int32), block_table.shape[1])
    # The null block and padding expand to ids below the first page of block 1.
    pages[pages < block_stride_pages] = DUMMY_PAGE_ID
    return pages


def mark_absent_pages(pages: Int32Array) -> Int32Array:
    """The same table with ABSENT_PAGE_ID for what `expand_block_table` left to the dummy page.

    For groups whose blocks may lie elsewhere: the dummy page would be read as rows of the sequence.
    """
    return np.where(pages == DUMMY_PAGE_ID, np.int32(ABSENT_PAGE_ID), pages)
