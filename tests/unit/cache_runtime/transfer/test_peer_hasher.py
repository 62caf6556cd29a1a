"""Digests of what a peer's ranks get are those of the blocks as they will lie there, whatever the numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from unit.cache_runtime.transfer.manifests import logical, rank

from cache_runtime.recipes.partition import TensorRank
from cache_runtime.transfer.engine import XXH3
from cache_runtime.transfer.peer_hasher import NodeHasher
from cache_runtime.transfer.schema import (
    FieldPlacement,
    FieldSchema,
    GroupBlockCount,
    LogicalManifest,
    RankPlacement,
    StageSchema,
)

NUM_BLOCKS = 6
NUM_HEADS = 4
SPLIT = FieldSchema(field_id="k", group_id="full", dtype="float32", block_shape=(2, NUM_HEADS, 3), partition_axis=1)
WHOLE = FieldSchema(field_id="latent", group_id="full", dtype="float32", block_shape=(2, 5))
CACHE: LogicalManifest = replace(logical(), fields=(SPLIT, WHOLE), stages=(StageSchema(field_ids=("k", "latent")),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What all blocks hold, over all ranks: float32[blocks, *block_shape] by field."""

    by_field: dict[str, npt.NDArray[np.float32]]

    def on_rank(self, item: FieldSchema, ranks: TensorRank, block: int) -> npt.NDArray[np.float32]:
        values = self.by_field[item.field_id][block]
        return values if item.partition_axis is None else values[:, list(ranks.heads(NUM_HEADS))]


@pytest.fixture
def content() -> Content:
    random = np.random.default_rng(3)
    return Content(
        by_field={
            item.field_id: random.random((NUM_BLOCKS, *item.block_shape), dtype=np.float32) for item in CACHE.fields
        }
    )


def make_rank(content: Content, ranks: TensorRank) -> tuple[RankPlacement, npt.NDArray[np.uint8]]:
    """A rank's placement and its arena, in which blocks of both fields take turns."""
    sizes = [item.rank_block_bytes(ranks.size) for item in CACHE.fields]
    stride = sum(sizes) + 4
    arena = np.zeros(NUM_BLOCKS * stride, dtype=np.uint8)
    fields = []
    for item, offset, size in zip(CACHE.fields, (0, sizes[0]), sizes, strict=True):
        fields.append(
            FieldPlacement(field_id=item.field_id, offset_bytes=offset, block_stride_bytes=stride, block_bytes=size)
        )
        for block in range(NUM_BLOCKS):
            begin = offset + block * stride
            arena[begin : begin + size] = np.frombuffer(content.on_rank(item, ranks, block).tobytes(), np.uint8)
    placement = replace(
        rank(),
        tp_rank=ranks.rank,
        tp_size=ranks.size,
        arena_base=int(arena.ctypes.data),
        arena_bytes=len(arena),
        fields=tuple(fields),
        block_counts=(GroupBlockCount(group_id="full", num_blocks=NUM_BLOCKS),),
    )
    return placement, arena


@pytest.mark.parametrize(("num_ours", "num_theirs"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (8, 1), (1, 8)])
def test_digests_are_of_whole_blocks_on_the_ranks_of_the_peer(content: Content, num_ours: int, num_theirs: int) -> None:
    ours = [make_rank(content, TensorRank(rank=index, size=num_ours)) for index in range(num_ours)]
    hasher = NodeHasher(CACHE, [placement for placement, _ in ours]).for_peer(num_theirs)
    assert hasher.num_ranks == num_theirs
    assert hasher.is_whole == (num_ours == num_theirs)
    for item in CACHE.fields:
        for index in range(num_theirs):
            on_rank = [content.on_rank(item, TensorRank(rank=index, size=num_theirs), block) for block in (4, 1, 5)]
            expected = b"".join(xxhash.xxh3_64_digest(values.tobytes())[::-1] for values in on_rank)
            assert hasher.digests(index, item.field_id, [4, 1, 5], XXH3) == expected


def test_no_block_outside_of_a_group_is_read(content: Content) -> None:
    ours = [make_rank(content, TensorRank(rank=index, size=2)) for index in range(2)]
    hasher = NodeHasher(CACHE, [placement for placement, _ in ours]).for_peer(1)
    for bad in (-1, NUM_BLOCKS):
        with pytest.raises(ValueError, match=r"are not all in \[0, 6\)"):
            hasher.digests(0, "k", [1, bad], XXH3)
    assert hasher.digests(0, "k", [], XXH3) == b""
    with pytest.raises(KeyError, match="strange"):
        hasher.digests(0, "strange", [1], XXH3)
    with pytest.raises(ValueError, match="lie nowhere here as a whole"):
        hasher.spans(0, "k", [1])
