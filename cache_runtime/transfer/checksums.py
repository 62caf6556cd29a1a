"""Checksums of cache blocks as a rank's arena holds them: the same bytes give the same digests whatever the packing.

One digest per block and field, over the block's bytes in that field and nothing between them. It knows no handoff; when
a block is complete, and whose it is, is the caller's business. Hashing reads memory and changes none, in native code
without the interpreter lock.

Source: XXH3, 64 bits, seed 0 (xxhash specification); digests are stored little-endian.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ._native import digest_spans
from .engine import NO_SPANS, Spans
from .schema import RankPlacement


class BlockHasher:
    """Hashes blocks in the arena of one rank of this process. Safe from every thread."""

    def __init__(self, placement: RankPlacement) -> None:
        """The arena that `placement` describes must be host memory of this process and outlive the hasher."""
        self._placement = placement

    def spans(self, field_id: str, blocks: Iterable[int]) -> Spans:
        """int64[num_blocks, 2]: addresses of the blocks in a field, in the given order.

        Raises KeyError for a field that the placement lacks, ValueError for a block that is not inside the arena.
        """
        field = self._placement.find_field(field_id)
        if field is None:
            raise KeyError(field_id)
        ids = np.fromiter(blocks, dtype=np.int64)
        if not len(ids):
            return NO_SPANS
        end_bytes = field.end_bytes(int(ids.max()) + 1)
        if int(ids.min()) < 0 or end_bytes > self._placement.arena_bytes:
            raise ValueError(
                f'field "{field_id}": blocks {int(ids.min())} to {int(ids.max())} end at byte {end_bytes}, '
                f"arena_bytes={self._placement.arena_bytes}"
            )
        begins = self._placement.arena_base + field.offset_bytes + ids * field.block_stride_bytes
        return np.stack((begins, begins + field.block_bytes), axis=1)

    def digests(self, field_id: str, blocks: Iterable[int]) -> bytes:
        """8 bytes per block, in the given order; raises like `spans`."""
        return digest_spans(self.spans(field_id, blocks))
