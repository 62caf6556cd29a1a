"""Checksums of what the ranks of a peer get, taken from the arenas that it comes from.

A digest is that of a whole block as the peer's rank holds it, so the peer need not know how many ranks have filled it.
Between nodes of equally many ranks that is a block here; otherwise it is put together from what the ranks here have of
it, which costs a copy. Knows no handoff; when a block is complete is the caller's business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cache_runtime.recipes.partition import TensorRank

from ._native import digest_spans
from .checksums import BlockHasher
from .engine import Spans
from .partition import Strips, field_strips
from .schema import FieldSchema, LogicalManifest, RankPlacement

# uint8[arena_bytes], by rank.
Arenas: TypeAlias = Sequence[npt.NDArray[np.uint8]]


class PeerHasher(Protocol):
    """For a peer of one number of ranks. Safe from every thread."""

    @property
    def num_ranks(self) -> int:
        """Of the peer."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether blocks of the peer are blocks here, so that `spans` says where they lie."""
        ...

    def spans(self, rank: int, field_id: str, blocks: Sequence[int]) -> Spans:
        """See `BlockHasher.spans`; `blocks` are ids here, `rank` is the peer's."""
        ...

    def digests(self, rank: int, field_id: str, blocks: Sequence[int], kind: str) -> bytes:
        """8 bytes per block, in the given order; raises like `spans`, see `BlockHasher`."""
        ...


class NodeHasher:
    """Makes the hashers for the peers of one node, whose arenas are memory of this process and outlive them."""

    def __init__(self, logical: LogicalManifest, sources: Sequence[RankPlacement]) -> None:
        self._logical = logical
        self._sources = tuple(sources)
        self._equals = EqualRanksHasher(sources)
        self._recutting: dict[int, RecutHasher] = {}

    def for_peer(self, num_ranks: int) -> PeerHasher:
        """Of so many tensor ranks."""
        if num_ranks == self._equals.num_ranks:
            return self._equals
        if num_ranks not in self._recutting:
            self._recutting[num_ranks] = RecutHasher(self._logical, self._sources, num_ranks)
        return self._recutting[num_ranks]


class EqualRanksHasher:
    """Each rank of the peer holds what the rank of the same number holds here."""

    is_whole = True

    def __init__(self, sources: Sequence[RankPlacement]) -> None:
        self._hashers = tuple(BlockHasher(source) for source in sources)

    @property
    def num_ranks(self) -> int:
        return len(self._hashers)

    def spans(self, rank: int, field_id: str, blocks: Sequence[int]) -> Spans:
        return self._hashers[rank].spans(field_id, blocks)

    def digests(self, rank: int, field_id: str, blocks: Sequence[int], kind: str) -> bytes:
        return self._hashers[rank].digests(field_id, blocks, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one rank here has of a block of a field on a rank of the peer."""

    blocks: npt.NDArray[np.uint8]  # [blocks, bytes of a block]: the field in the arena
    strips: Strips


class RecutHasher:
    """The peer's ranks have other heads than those here."""

    is_whole = False

    def __init__(self, logical: LogicalManifest, sources: Sequence[RankPlacement], num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._block_bytes = {item.field_id: item.rank_block_bytes(num_ranks) for item in logical.fields}
        arenas = tuple(_arena_of(source) for source in sources)
        self._shares: Mapping[tuple[int, str], tuple[_Share, ...]] = {
            (rank, item.field_id): _shares_of(item, sources, arenas, TensorRank(rank=rank, size=num_ranks))
            for rank in range(num_ranks)
            for item in logical.fields
        }

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    def spans(self, rank: int, field_id: str, blocks: Sequence[int]) -> Spans:
        raise ValueError(f'field "{field_id}": the blocks of rank {rank} of the peer lie nowhere here as a whole')

    def digests(self, rank: int, field_id: str, blocks: Sequence[int], kind: str) -> bytes:
        ids = np.asarray(blocks, dtype=np.int64)
        whole = np.empty((len(ids), self._block_bytes[field_id]), dtype=np.uint8)
        for share in self._shares[rank, field_id]:
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(share.blocks):
                raise ValueError(f'field "{field_id}": blocks {ids.tolist()} are not all in [0, {len(share.blocks)})')
            mine = share.blocks[ids]
            for begin, target, length in share.strips.tolist():
                whole[:, target : target + length] = mine[:, begin : begin + length]
        begins = whole.ctypes.data + np.arange(len(ids), dtype=np.int64) * whole.shape[1]
        return digest_spans(np.stack((begins, begins + whole.shape[1]), axis=1), kind)


def _arena_of(source: RankPlacement) -> npt.NDArray[np.uint8]:
    memory = (ctypes.c_ubyte * source.arena_bytes).from_address(source.arena_base)
    return np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint8)


def _shares_of(
    item: FieldSchema, sources: Sequence[RankPlacement], arenas: Arenas, target: TensorRank
) -> tuple[_Share, ...]:
    shares = []
    for source, arena in zip(sources, arenas, strict=True):
        strips = field_strips(item, source.tensor_rank, target)
        field, num_blocks = source.find_field(item.field_id), source.find_num_blocks(item.group_id)
        if field is None or num_blocks is None or not len(strips):
            continue
        blocks = np.lib.stride_tricks.as_strided(
            arena[field.offset_bytes :], (num_blocks, field.block_bytes), (field.block_stride_bytes, 1), writeable=False
        )
        shares.append(_Share(blocks=blocks, strips=strips))
    return tuple(shares)
