"""Checksums of cache blocks as a rank's arena holds them: the same bytes give the same digests whatever the packing.

One digest per block and field, over the block's bytes in that field and nothing between them. It knows no handoff; when
a block is complete, and whose it is, is the caller's business. Hashing reads memory and changes none, in native code
without the interpreter lock.

A digest is 8 bytes, little-endian, of one of two kinds. "xxh3" is that of everybody; of two nodes whose processors can,
"aes16" takes a third of its time on data that the cache has.
Source: XXH3, 64 bits, seed 0 (xxhash specification); AES-16: csrc/aes_digest.cpp, from the rounds of FIPS 197.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ._native import DIGEST_KINDS, digest_spans
from .engine import NO_SPANS, Spans
from .schema import RankPlacement

# Kinds that this CPU can take, the fastest first; the last is "xxh3".
RUNNABLE_DIGEST_KINDS: tuple[str, ...] = DIGEST_KINDS


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
        first, last = int(ids.min()), int(ids.max())
        end_bytes = field.end_bytes(last + 1)
        if first < 0 or end_bytes > self._placement.arena_bytes:
            raise ValueError(
                f'field "{field_id}": blocks {first} to {last} end at byte {end_bytes}, '
                f"arena_bytes={self._placement.arena_bytes}"
            )
        spans = np.empty((len(ids), 2), dtype=np.int64)
        spans[:, 0] = ids * field.block_stride_bytes + (self._placement.arena_base + field.offset_bytes)
        spans[:, 1] = spans[:, 0] + field.block_bytes
        return spans

    def digests(self, field_id: str, blocks: Iterable[int], kind: str) -> bytes:
        """8 bytes per block, in the given order. Raises like `spans`, and ValueError for a kind that this CPU lacks."""
        return digest_spans(self.spans(field_id, blocks), kind)
