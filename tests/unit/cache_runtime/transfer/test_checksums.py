"""Digests depend on the bytes of a block and field, and on nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from unit.cache_runtime.transfer.aes_reference import aes16, aes_round
from unit.cache_runtime.transfer.manifests import rank

from cache_runtime.transfer._native import DIGEST_KINDS, DIGEST_VARIANTS, digest_blocks, digest_spans
from cache_runtime.transfer.checksums import BlockHasher
from cache_runtime.transfer.engine import XXH3
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
    assert ours.digests("k", [4, 1, 2], XXH3) == theirs.digests("k", [1, 2, 3], XXH3) == expected


@pytest.mark.parametrize("kind", DIGEST_KINDS)
@pytest.mark.parametrize("byte", [0, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
def test_any_bit_counts(byte: int, kind: str) -> None:
    hasher, blocks = arena(BLOCK_BYTES, 0, fill=0)
    before = hasher.digests("k", [1, 2, 3], kind)
    blocks[2, byte] ^= 0x10
    after = hasher.digests("k", [1, 2, 3], kind)
    assert before[:DIGEST_BYTES] == after[:DIGEST_BYTES]
    assert before[DIGEST_BYTES : 2 * DIGEST_BYTES] != after[DIGEST_BYTES : 2 * DIGEST_BYTES]
    assert before[2 * DIGEST_BYTES :] == after[2 * DIGEST_BYTES :]


def specified(kind: str, data: bytes) -> bytes:
    """The digest as the definition has it, without the code under test."""
    return xxhash.xxh3_64_digest(data)[::-1] if kind == XXH3 else aes16(data)


def test_the_definition_of_aes16_is_that_of_every_release() -> None:
    assert aes16(b"").hex() == "8a4681754361f56e"
    assert aes16(3 * bytes(range(256))).hex() == "75745516c4c64bea"
    # Source: FIPS 197, appendix C.1, the first round.
    state, key, after = (
        np.frombuffer(bytes.fromhex(digits), dtype=np.uint8)
        for digits in (
            "00102030405060708090a0b0c0d0e0f0",
            "d6aa74fdd2af72fadaa678f1d6ab76fe",
            "89d810e8855ace682d1843d8cb128fe4",
        )
    )
    assert aes_round(state, key).tolist() == after.tolist()


@pytest.mark.parametrize(("kind", "instruction_set"), DIGEST_VARIANTS)
@pytest.mark.parametrize(
    "num_bytes", [1, 3, 8, 15, 16, 17, 128, 129, 240, 241, 255, 256, 257, 511, 512, 1023, 1024, 1025, 5000, 1 << 16]
)
def test_whatever_the_processor_has_the_digests_are_those_of_the_definition(
    kind: str, instruction_set: str, num_bytes: int
) -> None:
    memory = np.random.default_rng(num_bytes).integers(0, 256, 2 * num_bytes + 9, dtype=np.uint8)
    begins = np.array([0, 9, num_bytes + 1]) + int(memory.ctypes.data)
    blocks = [memory[begin : begin + num_bytes].tobytes() for begin in (0, 9, num_bytes + 1)]
    whole = np.array([[0, num_bytes]])
    assert digest_blocks(begins, whole, kind, instruction_set) == b"".join(specified(kind, block) for block in blocks)
    # In two pieces that do not touch, and not in the order of their addresses.
    cut = num_bytes // 2
    pieces = np.array([[cut + 1, num_bytes - cut - 1], [0, cut]])
    expected = b"".join(specified(kind, block[cut + 1 :] + block[:cut]) for block in blocks)
    assert digest_blocks(begins, pieces, kind, instruction_set) == expected


@pytest.mark.parametrize(("kind", "instruction_set"), DIGEST_VARIANTS)
def test_a_block_in_pieces_of_any_lengths_has_the_digest_of_the_whole(kind: str, instruction_set: str) -> None:
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 256, 3000, dtype=np.uint8)
    begins = np.array([int(memory.ctypes.data) + 5])
    for _ in range(200):
        num_bytes = int(rng.integers(1, 2900))
        cuts = np.sort(rng.integers(0, num_bytes + 1, int(rng.integers(0, 9))))
        ends = np.append(cuts, num_bytes)
        pieces = np.stack((np.append(0, cuts), np.diff(ends, prepend=0)), axis=1)
        whole = np.array([[0, num_bytes]])
        assert digest_blocks(begins, pieces, kind, instruction_set) == digest_blocks(begins, whole, kind)


def digest_of(data: npt.NDArray[np.uint8], kind: str) -> bytes:
    begin = int(data.ctypes.data)
    return digest_spans(np.array([[begin, begin + len(data)]]), kind)


@pytest.mark.parametrize("kind", DIGEST_KINDS)
@pytest.mark.parametrize("num_bytes", [40, 256, 700])
@pytest.mark.parametrize("content", ["noise", "zeros"])
def test_each_bit_makes_another_digest(kind: str, num_bytes: int, content: str) -> None:
    noise = np.random.default_rng(4).integers(0, 256, num_bytes, dtype=np.uint8)
    data = noise if content == "noise" else np.zeros(num_bytes, dtype=np.uint8)
    seen = {digest_of(data, kind)}
    for bit in range(8 * num_bytes):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(digest_of(data, kind))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * num_bytes + 1


@pytest.mark.parametrize("kind", DIGEST_KINDS)
def test_runs_of_one_byte_of_every_length_have_digests_of_their_own(kind: str) -> None:
    seen = {digest_of(np.full(num_bytes, fill, dtype=np.uint8), kind) for fill in (0, 255) for num_bytes in range(1100)}
    assert len(seen) == 2 * 1100 - 1  # of nothing there is one


@pytest.mark.parametrize("kind", DIGEST_KINDS)
@pytest.mark.parametrize("unit_bytes", [8, 16, 64, 256, 1024])
def test_parts_that_change_places_and_bytes_that_shift_are_noticed(kind: str, unit_bytes: int) -> None:
    data = np.random.default_rng(5).integers(0, 256, 8 * unit_bytes, dtype=np.uint8)
    units = data.reshape(8, unit_bytes)
    seen = {digest_of(data, kind)}
    for left in range(8):
        for right in range(left):
            swapped = units.copy()
            swapped[[left, right]] = units[[right, left]]
            seen.add(digest_of(swapped.reshape(-1), kind))
            copied = units.copy()
            copied[left] = units[right]
            seen.add(digest_of(copied.reshape(-1), kind))
    num_shifts = len(data) - 1
    for num_bytes in range(1, num_shifts + 1):
        seen.add(digest_of(np.roll(data, num_bytes), kind))
    assert len(seen) == 1 + 2 * 28 + num_shifts


def test_what_the_processor_or_this_release_lacks_is_refused_by_name() -> None:
    assert DIGEST_VARIANTS[-1] == (XXH3, "baseline")
    assert DIGEST_KINDS[-1] == XXH3
    with pytest.raises(ValueError, match='"mmx" for digests of kind "xxh3" does not run'):
        digest_blocks(np.array([1]), np.array([[0, 1]]), XXH3, "mmx")
    with pytest.raises(ValueError, match='digest kind "crc7" is not known'):
        digest_spans(np.array([[1, 2]]), "crc7")


def test_no_byte_outside_of_the_arena_is_read() -> None:
    hasher, _ = arena(BLOCK_BYTES, 0, fill=0)
    for bad in (-1, 1024 // BLOCK_BYTES, 1 << 40):
        with pytest.raises(ValueError, match="arena_bytes=1024"):
            hasher.digests("k", [1, bad], XXH3)
    assert hasher.digests("k", [], XXH3) == b""


def test_a_field_that_the_placement_lacks_is_an_error() -> None:
    with pytest.raises(KeyError, match="v"):
        arena(BLOCK_BYTES, 0, fill=0)[0].digests("v", [1], XXH3)
