"""Blocks are hashed while they move, where a plane can: what is told is what a second look at the memory would say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from integration.data_plane.planes import Memory

from cache_runtime.transfer._native import DIGEST_KINDS, NativePermit, digest_spans
from cache_runtime.transfer.engine import (
    PeerLink,
    Permit,
    Region,
    Spans,
    TransferEngine,
    TransferRejected,
)
from cache_runtime.transfer.runs import RunTable

KEY = b"0123456789abcdef"
KIND = DIGEST_KINDS[0]
KIB = 1 << 10
BLOCK_BYTES = 48 * KIB + 40
NUM_BLOCKS = 300  # together longer than the longest piece and the longest batch
PATIENCE_S = 30.0


class Pair:
    """A writer and a receiver of one plane in this process, with a grant of the first blocks of the target."""

    def __init__(self, make_engine: Callable[[], TransferEngine], source: Memory) -> None:
        self.receiver = make_engine()
        self.target = Memory((NUM_BLOCKS + 1) * BLOCK_BYTES)
        self.target.register_with(self.receiver)
        self.sent = blocks_of(source.region)
        self.granted = blocks_of(self.target.region)
        self.permit: Permit = self.receiver.allow(KEY, self.granted, hashed_as=KIND)
        self.link: PeerLink = make_engine().open_peer(self.receiver.endpoint, [self.target.region])

    @property
    def num_hashed(self) -> int:
        """Blocks that were hashed when they arrived; all are said to be where a plane hashes none."""
        return self.permit.num_hashed_blocks if isinstance(self.permit, NativePermit) else NUM_BLOCKS

    def write(self, rows: list[tuple[int, int, int]], hashed: Spans) -> bytes:
        runs = RunTable(np.array(rows, dtype=np.int64))
        write = self.link.write(runs, key=KEY, timeout_s=PATIENCE_S, hashed=hashed, digest_kind=KIND)
        return write.result(PATIENCE_S).digests


def blocks_of(region: Region) -> Spans:
    begins = region.base_address + 16 + np.arange(NUM_BLOCKS) * BLOCK_BYTES
    return np.stack((begins, begins + BLOCK_BYTES), axis=1)


@pytest.fixture
def pair(make_engine: Callable[[], TransferEngine], source: Memory) -> Pair:
    return Pair(make_engine, source)


def whole(pair: Pair) -> list[tuple[int, int, int]]:
    return [(int(pair.sent[0, 0]), int(pair.granted[0, 0]), NUM_BLOCKS * BLOCK_BYTES)]


def scattered(pair: Pair) -> list[tuple[int, int, int]]:
    """Each block to another place, in runs of 4 KiB."""
    places = np.random.default_rng(1).permutation(NUM_BLOCKS)
    return [
        (int(sent) + offset, int(pair.granted[place, 0]) + offset, min(4 * KIB, BLOCK_BYTES - offset))
        for sent, place in zip(pair.sent[:, 0], places, strict=True)
        for offset in range(0, BLOCK_BYTES, 4 * KIB)
    ]


def test_the_sender_learns_what_it_sent_in_the_order_in_which_it_asked(pair: Pair) -> None:
    if not pair.link.hashes:
        pytest.skip("the plane hashes nothing")
    order = np.random.default_rng(2).permutation(NUM_BLOCKS)
    assert pair.write(whole(pair), pair.sent[order]) == digest_spans(pair.sent[order], KIND)
    assert pair.write(whole(pair), pair.sent[:0]) == b""


@pytest.mark.parametrize("shape", [whole, scattered])
def test_the_receiver_tells_what_arrived_in_runs_of_any_shape(pair: Pair, shape: Callable[[Pair], list]) -> None:
    pair.write(shape(pair), pair.sent[:0])
    assert sorted_digests(pair.permit.digests(pair.granted, KIND)) == sorted_digests(digest_spans(pair.sent, KIND))
    assert pair.permit.digests(pair.granted[::-1].copy(), KIND) == digest_spans(pair.granted[::-1].copy(), KIND)
    assert pair.num_hashed == NUM_BLOCKS
    pair.permit.revoke()
    assert pair.permit.digests(pair.granted, KIND) == digest_spans(pair.granted, KIND)


def test_what_is_written_again_is_hashed_again_and_parts_of_blocks_are_read(pair: Pair) -> None:
    pair.write(whole(pair), pair.sent[:0])
    before = pair.permit.digests(pair.granted, KIND)
    # All of block 0 from elsewhere, a little of block 1, and the end of block 2 with the begin of block 3.
    first, second, third = (int(pair.granted[index, 0]) for index in range(3))
    other = int(pair.sent[7, 0]) + 3
    pair.write([(other, first, BLOCK_BYTES)], pair.sent[:0])
    pair.write([(other, second + 100, 11), (other, third + BLOCK_BYTES - 5, 10)], pair.sent[:0])
    after = pair.permit.digests(pair.granted, KIND)
    assert after == digest_spans(pair.granted, KIND)
    assert [index for index in range(NUM_BLOCKS) if after[8 * index :][:8] != before[8 * index :][:8]] == [0, 1, 2, 3]
    parts = np.array([[first + 1, first + 9], [second, third + 50]])
    assert pair.permit.digests(parts, KIND) == digest_spans(parts, KIND)


def test_a_kind_that_no_processor_takes_is_refused_by_name(pair: Pair) -> None:
    if not pair.link.hashes:
        pytest.skip("the plane hashes nothing")
    write = pair.link.write(RunTable(np.array(whole(pair))), key=KEY, timeout_s=PATIENCE_S, digest_kind="crc7")
    with pytest.raises(TransferRejected, match='digest kind "crc7" is none of'):
        write.result(PATIENCE_S)
    with pytest.raises(ValueError, match='digest kind "crc7" is not known'):
        pair.permit.digests(pair.granted, "crc7")


def test_what_was_hashed_in_one_way_on_arrival_is_read_for_another(pair: Pair) -> None:
    pair.write(whole(pair), pair.sent[:0])
    assert pair.permit.digests(pair.granted, DIGEST_KINDS[-1]) == digest_spans(pair.sent, DIGEST_KINDS[-1])


def test_a_grant_that_does_not_hash_tells_the_same(pair: Pair, source: Memory) -> None:
    pair.permit.revoke()
    pair.permit = pair.receiver.allow(KEY, pair.granted)
    pair.write(whole(pair), pair.sent[:0])
    assert pair.permit.digests(pair.granted, KIND) == digest_spans(pair.sent, KIND)
    assert pair.num_hashed in (0, NUM_BLOCKS)


def test_nothing_but_registered_memory_is_hashed(pair: Pair, source: Memory) -> None:
    if not pair.link.hashes:
        pytest.skip("the plane hashes nothing")
    for begin, end in ((-100, 10), (0, 0), (0, 1 << 40), (8, 4)):
        blocks = np.array([[source.region.base_address + begin, source.region.base_address + end]])
        with pytest.raises(TransferRejected, match="a block to hash is empty or outside"):
            pair.write(whole(pair), blocks)


def sorted_digests(digests: bytes) -> list[bytes]:
    return sorted(digests[begin : begin + 8] for begin in range(0, len(digests), 8))
