"""Digests depend on the bytes of a block and field, and on nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from unit.cache_runtime.transfer.manifests import rank

from cache_runtime.transfer._native import DIGEST_VARIANTS, digest_blocks
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


@pytest.mark.parametrize("variant", DIGEST_VARIANTS)
@pytest.mark.parametrize("num_bytes", [1, 3, 8, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 5000, 1 << 16])
def test_whatever_the_processor_has_the_digests_are_those_of_the_specification(variant: str, num_bytes: int) -> None:
    memory = np.random.default_rng(num_bytes).integers(0, 256, 2 * num_bytes + 9, dtype=np.uint8)
    begins = np.array([0, 9, num_bytes + 1]) + int(memory.ctypes.data)
    blocks = [memory[begin : begin + num_bytes].tobytes() for begin in (0, 9, num_bytes + 1)]
    whole = np.array([[0, num_bytes]])
    expected = b"".join(xxhash.xxh3_64_digest(block)[::-1] for block in blocks)
    assert digest_blocks(begins, whole, variant) == expected
    # In two pieces that do not touch, and not in the order of their addresses.
    cut = num_bytes // 2
    pieces = np.array([[cut + 1, num_bytes - cut - 1], [0, cut]])
    expected = b"".join(xxhash.xxh3_64_digest(block[cut + 1 :] + block[:cut])[::-1] for block in blocks)
    assert digest_blocks(begins, pieces, variant) == expected


def test_an_instruction_set_that_the_processor_lacks_is_refused() -> None:
    assert DIGEST_VARIANTS[-1] == "baseline"
    with pytest.raises(ValueError, match='"mmx" does not run'):
        digest_blocks(np.array([1]), np.array([[0, 1]]), "mmx")


def test_no_byte_outside_of_the_arena_is_read() -> None:
    hasher, _ = arena(BLOCK_BYTES, 0, fill=0)
    for bad in (-1, 1024 // BLOCK_BYTES, 1 << 40):
        with pytest.raises(ValueError, match="arena_bytes=1024"):
            hasher.digests("k", [1, bad])
    assert hasher.digests("k", []) == b""


def test_a_field_that_the_placement_lacks_is_an_error() -> None:
    with pytest.raises(KeyError, match="v"):
        arena(BLOCK_BYTES, 0, fill=0)[0].digests("v", [1])
