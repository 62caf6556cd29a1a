"""The checksums of one handoff: told of once their blocks have landed, all of them, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

import numpy as np
import pytest

from cache_runtime.transfer.engine import Spans
from node_runtime.handoff.messages import Checksums
from prefill_node.checksums import ChecksumNews, ChecksumsComplete, ShippedBlocks, TransferChecksums

ID = b"h" * 16


class SameThread(Executor):
    """Carries out at once what is submitted."""

    is_shut = False

    def submit(self, work: Callable[..., object], /, *arguments: object, **_: object) -> Future[object]:
        if self.is_shut:
            raise RuntimeError("shut down")
        work(*arguments)
        return Future()


class Hasher:
    """Each block's number as its digest, and 1000 more for each rank of the peer."""

    is_whole = True

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks

    def digests(self, rank: int, field_id: str, blocks: Sequence[int], kind: str) -> bytes:
        assert kind == "xxh3"
        if field_id == "broken":
            raise KeyError(field_id)
        return b"".join((1000 * rank + block).to_bytes(8, "little") for block in blocks)

    def spans(self, rank: int, field_id: str, blocks: Sequence[int]) -> Spans:
        if field_id == "broken":
            raise KeyError(field_id)
        return np.array([(1000 * rank + block, 1000 * rank + block + 1) for block in blocks])


@pytest.fixture
def news() -> list[ChecksumNews]:
    return []


@pytest.fixture
def faults() -> list[Exception]:
    return []


@pytest.fixture
def executor() -> SameThread:
    return SameThread()


@pytest.fixture
def checksums(news, faults, executor) -> TransferChecksums:
    return TransferChecksums(Hasher(), executor, handoff_id=ID, tell=news.append, on_fault=faults.append)


def shipped(field_id: str, first_slot: int, num_blocks: int) -> list[ShippedBlocks]:
    blocks = tuple(range(first_slot + 1, first_slot + 1 + num_blocks))
    return [ShippedBlocks(field_ids=(field_id,), first_slot=first_slot, blocks=blocks)]


def covered(news: list[ChecksumNews]) -> list[tuple[str, int, int]]:
    """(field, slot, block) of everything that was told."""
    return [
        (item.field_id, item.first_slot + index, int.from_bytes(item.digests[8 * index : 8 * index + 8], "little"))
        for message in news
        if isinstance(message, Checksums)
        for item in message.fields
        for index in range(item.num_blocks)
    ]


def test_nothing_is_told_of_before_it_has_landed_and_the_last_is_told_before_the_end(checksums, news) -> None:
    first, second = checksums.posting(shipped("k", 0, 3)), checksums.posting(shipped("k", 3, 2))
    checksums.complete()
    assert news == []
    second.on_landed(b"")
    assert news == []
    first.on_landed(b"")
    assert covered(news) == [("k", slot, slot + 1) for slot in (3, 4, 0, 1, 2)]
    assert news[-1] == ChecksumsComplete(num_parts=1)


def test_large_transfers_are_told_of_in_parts_while_they_go_on(checksums, news) -> None:
    landed = [checksums.posting(shipped("k", 200 * index, 200)) for index in range(5)]
    for each in landed[:4]:
        each.on_landed(b"")
    assert [message.part for message in news] == [0, 1]
    landed[4].on_landed(b"")
    checksums.complete()
    assert [message.part for message in news[:-1]] == [0, 1, 2]
    assert news[-1] == ChecksumsComplete(num_parts=3)
    assert sorted(covered(news)) == [("k", slot, slot + 1) for slot in range(1000)]


def test_no_message_is_about_more_blocks_than_it_may_be(checksums, news) -> None:
    pieces = [piece for index in range(9) for piece in shipped(f"f{index}", 0, 5000)]
    checksums.posting(pieces).on_landed(b"")
    checksums.complete()
    assert len(news) == 4
    assert all(sum(item.num_blocks for item in message.fields) <= 1 << 14 for message in news[:-1])
    assert len(covered(news)) == 45_000


def test_a_fault_is_told_once_and_nothing_after_it(checksums, news, faults) -> None:
    good, bad = checksums.posting(shipped("k", 0, 1)), checksums.posting(shipped("broken", 0, 1))
    good.on_landed(b"")
    bad.on_landed(b"")
    checksums.complete()
    assert [type(fault) for fault in faults] == [KeyError]
    assert news == []


def test_a_link_that_hashes_is_asked_for_every_block_and_its_digests_are_told(news, faults, executor) -> None:
    executor.is_shut = True  # nobody is needed beside the link
    checksums = TransferChecksums(
        Hasher(), executor, handoff_id=ID, tell=news.append, on_fault=faults.append, link_hashes=True
    )
    two_fields = [ShippedBlocks(field_ids=("k", "v"), first_slot=5, blocks=(9, 7))]
    first, second = checksums.posting([*two_fields, *shipped("k", 7, 1)]), checksums.posting(shipped("v", 7, 1))
    assert first.blocks[:, 0].tolist() == [9, 7, 9, 7, 8]
    checksums.complete()
    second.on_landed(b"".join(number.to_bytes(8, "little") for number in (50,)))
    assert news == []
    first.on_landed(b"".join(number.to_bytes(8, "little") for number in (10, 20, 30, 40, 60)))
    assert covered(news) == [("v", 7, 50), ("k", 5, 10), ("k", 6, 20), ("v", 5, 30), ("v", 6, 40), ("k", 7, 60)]
    assert news[-1] == ChecksumsComplete(num_parts=1)
    assert faults == []


def test_a_fault_before_a_link_could_hash_is_told_once_and_nothing_after_it(news, faults, executor) -> None:
    checksums = TransferChecksums(
        Hasher(), executor, handoff_id=ID, tell=news.append, on_fault=faults.append, link_hashes=True
    )
    good, bad = checksums.posting(shipped("k", 0, 1)), checksums.posting(shipped("broken", 0, 1))
    good.on_landed(bytes(8))
    bad.on_landed(bad.blocks.tobytes())
    checksums.complete()
    assert [type(fault) for fault in faults] == [KeyError]
    assert news == []


def test_a_node_that_stops_fails_the_handoff_and_raises_nothing(checksums, news, faults, executor) -> None:
    landed = checksums.posting(shipped("k", 0, 1))
    executor.is_shut = True
    landed.on_landed(b"")
    assert [type(fault) for fault in faults] == [RuntimeError]
    assert news == []


@pytest.mark.parametrize("link_hashes", [False, True])
def test_a_peer_of_several_ranks_is_told_of_every_block_on_each(news, faults, executor, link_hashes: bool) -> None:
    checksums = TransferChecksums(
        Hasher(2), executor, handoff_id=ID, tell=news.append, on_fault=faults.append, link_hashes=link_hashes
    )
    write = checksums.posting([ShippedBlocks(field_ids=("k", "v"), first_slot=5, blocks=(9, 7))])
    numbers = write.blocks[:, 0].tolist() if link_hashes else []
    write.on_landed(b"".join(number.to_bytes(8, "little") for number in numbers))
    checksums.complete()
    told = [(item.field_id, item.tp_rank) for message in news[:-1] for item in message.fields]
    assert told == [("k", 0), ("k", 1), ("v", 0), ("v", 1)]
    assert [block for _, _, block in covered(news)] == 2 * [9, 7, 1009, 1007]


def test_a_link_is_not_asked_for_blocks_that_are_put_together_from_those_of_several_ranks(
    news, faults, executor
) -> None:
    hasher = Hasher(2)
    hasher.is_whole = False
    checksums = TransferChecksums(
        hasher, executor, handoff_id=ID, tell=news.append, on_fault=faults.append, link_hashes=True
    )
    write = checksums.posting(shipped("k", 0, 1))
    assert not len(write.blocks)
    write.on_landed(b"")
    checksums.complete()
    assert covered(news) == [("k", 0, 1), ("k", 0, 1001)]
