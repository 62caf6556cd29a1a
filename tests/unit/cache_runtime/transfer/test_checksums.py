"""Digests depend on the bytes of a block and field, and on nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from unit.cache_runtime.transfer.manifests import rank

from cache_runtime.transfer.checksums import BlockHasher
from cache_runtime.transfer.schema import FieldPlacement, GroupBlockCount

BLOCK_BYTES = 24
DIGEST_BYTES = 8
NUM_BLOCKS = 5


def arena(stride_bytes: int, offset_bytes: int, fill: int) -> tuple[BlockHasher, npt.NDArray[np.uint8]]:
    """A hasher and the bytes of its blocks, uint8[blocks, bytes], with `fill` between them."""
    memory = np.full(1024, fill, dtype=np.uint8)
    field = FieldPlacement(
        field_id="k", offset_bytes=offset_bytes, block_stride_bytes=stride_bytes, block_bytes=BLOCK_BYTES
    )
    placement = replace(
        rank(),
        arena_base=int(memory.ctypes.data),
        arena_bytes=len(memory),
        fields=(field,),
        block_counts=(GroupBlockCount(group_id="full", num_blocks=NUM_BLOCKS),),
    )
    blocks = np.lib.stride_tricks.as_strided(memory[offset_bytes:], (NUM_BLOCKS, BLOCK_BYTES), (stride_bytes, 1))
    return BlockHasher(placement), blocks


def test_the_same_bytes_have_the_same_digests_whatever_lies_around_them_and_wherever_they_lie() -> None:
    ours, our_blocks = arena(BLOCK_BYTES, 0, fill=1)
    theirs, their_blocks = arena(BLOCK_BYTES + 7, 13, fill=2)
    content = np.arange(3 * BLOCK_BYTES, dtype=np.uint8).reshape(3, BLOCK_BYTES)
    our_blocks[[4, 1, 2]] = content
    their_blocks[[1, 2, 3]] = content
    expected = b"".join(xxhash.xxh3_64_digest(block.tobytes())[::-1] for block in content)
    assert ours.digests("k", [4, 1, 2]) == theirs.digests("k", [1, 2, 3]) == expected


@pytest.mark.parametrize("byte", [0, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
def test_any_bit_counts(byte: int) -> None:
    hasher, blocks = arena(BLOCK_BYTES, 0, fill=0)
    before = hasher.digests("k", [1, 2, 3])
    blocks[2, byte] ^= 0x10
    after = hasher.digests("k", [1, 2, 3])
    assert before[:DIGEST_BYTES] == after[:DIGEST_BYTES]
    assert before[DIGEST_BYTES : 2 * DIGEST_BYTES] != after[DIGEST_BYTES : 2 * DIGEST_BYTES]
    assert before[2 * DIGEST_BYTES :] == after[2 * DIGEST_BYTES :]


def test_a_field_that_the_placement_lacks_is_an_error() -> None:
    with pytest.raises(KeyError, match="v"):
        arena(BLOCK_BYTES, 0, fill=0)[0].digests("v", [1])


def test_only_ranks_that_hold_whole_blocks_can_be_compared() -> None:
    hasher, _ = arena(BLOCK_BYTES, 0, fill=0)
    other = replace(
        rank(), fields=(FieldPlacement(field_id="k", offset_bytes=9, block_stride_bytes=99, block_bytes=24),)
    )
    assert hasher.can_compare(other)
    half = replace(other.fields[0], block_bytes=12)
    assert not hasher.can_compare(replace(other, fields=(half,)))
    assert not hasher.can_compare(replace(other, tp_size=2))
    assert not hasher.can_compare(replace(other, fields=(*other.fields, replace(half, field_id="v"))))
