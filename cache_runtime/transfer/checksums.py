"""Checksums of cache blocks as a rank's arena holds them: the same bytes give the same digests whatever the packing.

One digest per block and field, over the block's bytes in that field and nothing between them. It knows no handoff; when
a block is complete, and whose it is, is the caller's business. Hashing reads memory and changes none.

Source: XXH3, 64 bits, seed 0 (xxhash specification); digests are stored little-endian.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import xxhash

from .schema import RankPlacement


class BlockHasher:
    """Hashes blocks in the arena of one rank of this process. Safe from every thread."""

    def __init__(self, placement: RankPlacement) -> None:
        """The arena that `placement` describes must belong to this process and outlive the hasher."""
        self._placement = placement
        arena = (ctypes.c_ubyte * placement.arena_bytes).from_address(placement.arena_base)
        self._arena = memoryview(arena).cast("B")

    def can_compare(self, other: RankPlacement) -> bool:
        """Whether the rank of `other` holds whole blocks of ours, so that digests of the two mean the same bytes."""
        ours = self._placement
        theirs = {item.field_id: item.block_bytes for item in other.fields}
        return ours.tp_size == other.tp_size == 1 and theirs == {
            item.field_id: item.block_bytes for item in ours.fields
        }

    def digests(self, field_id: str, blocks: Iterable[int]) -> bytes:
        """8 bytes per block, in the given order. Raises KeyError for a field that the placement lacks."""
        field = self._placement.find_field(field_id)
        if field is None:
            raise KeyError(field_id)
        offset_bytes, stride_bytes, block_bytes = field.offset_bytes, field.block_stride_bytes, field.block_bytes
        values = np.fromiter(
            (
                xxhash.xxh3_64_intdigest(self._arena[begin : begin + block_bytes])
                for begin in (offset_bytes + block * stride_bytes for block in blocks)
            ),
            dtype="<u8",
        )
        return values.tobytes()
