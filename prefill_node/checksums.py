"""Checksums of what one handoff ships: taken block by block while it is sent, and told of when it has landed.

The engine thread says which blocks it is about to post; their rows are never modified after that, so it does not matter
when they are hashed: by the link as it sends them, where it can, for then they need not be read from memory twice. They
are told of once they have landed, so that the receiver can compare them while others are on their way. It knows no gRPC
and no session.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cache_runtime.transfer.engine import NO_SPANS
from cache_runtime.transfer.peer_hasher import PeerHasher
from node_runtime.handoff.messages import DIGEST_BYTES, XXH3, Checksums, FieldChecksums
from prefill_node.outgoing import HashedWrite

_log = logging.getLogger(__name__)

# How many blocks of fields one message is about: enough to be rare, few enough to be compared long before the last ones
# land, which takes no time where they were hashed on arrival. The upper limit keeps a message far below what gRPC can
# take.
_MIN_PART_DIGESTS = 256
_MIN_HASHED_PART_DIGESTS = 2048
_MAX_PART_DIGESTS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedBlocks:
    """Blocks of this node that a write reads, of all `field_ids`, for the table slots from `first_slot` on."""

    field_ids: tuple[str, ...]
    first_slot: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumsComplete:
    """All checksums were told of."""

    num_parts: int


ChecksumNews: TypeAlias = Checksums | ChecksumsComplete


class TransferChecksums:
    """The checksums of one handoff. `posting` and `complete` belong to the engine thread."""

    def __init__(
        self,
        hasher: PeerHasher,
        executor: Executor,
        *,
        handoff_id: bytes,
        tell: Callable[[ChecksumNews], None],
        on_fault: Callable[[Exception], None],
        link_hashes: bool = False,
        kind: str = XXH3,
    ) -> None:
        """
        Args:
            executor: One thread, which hashes in the order in which it was asked; idle where the link hashes.
            tell: Hears the checksums, on any thread; must not block.
            on_fault: Hears why there are none, in the same way.
            link_hashes: Whether the link hashes what it sends, see `PeerLink`. It cannot where blocks are recut.
            kind: Of the digests.
        """
        self._hasher = hasher
        self._executor = executor
        self._handoff_id = handoff_id
        self._tell = tell
        self._on_fault = on_fault
        self._kind = kind
        self._link_hashes = link_hashes and hasher.is_whole
        self._min_part_digests = _MIN_HASHED_PART_DIGESTS if self._link_hashes else _MIN_PART_DIGESTS
        self._lock = threading.Lock()
        self._has_failed = False
        self._is_complete = False
        self._num_in_flight = 0
        self._num_parts = 0
        self._landed: list[FieldChecksums] = []

    def posting(self, shipped: Sequence[ShippedBlocks]) -> HashedWrite:
        """What is to be told of these blocks when they have landed. Hashed by the link as it sends, or beside it."""
        with self._lock:
            self._num_in_flight += 1
        if self._link_hashes:
            return self._hashed_by_link(shipped)
        hashed: list[FieldChecksums] = []
        self._submit(lambda: self._hash(shipped, hashed))
        return HashedWrite(blocks=NO_SPANS, on_landed=lambda _: self._submit(lambda: self._note_landed(hashed)))

    def complete(self) -> None:
        """Nothing more is posted."""
        self._run(self._note_complete)

    def _hashed_by_link(self, shipped: Sequence[ShippedBlocks]) -> HashedWrite:
        try:
            spans = [
                self._hasher.spans(rank, field_id, piece.blocks)
                for piece, field_id, rank in _in_order(shipped, self._hasher.num_ranks)
            ]
        except Exception as error:
            self._fail(error)
            return HashedWrite(blocks=NO_SPANS, on_landed=lambda _: None)
        return HashedWrite(
            blocks=np.concatenate(spans),
            kind=self._kind,
            on_landed=lambda digests: self._run(
                lambda: self._note_landed(_split(shipped, self._hasher.num_ranks, digests))
            ),
        )

    def _submit(self, work: Callable[[], None]) -> None:
        try:
            self._executor.submit(self._run, work)
        except RuntimeError as error:
            # The node stops; its handoffs are cut off all the same.
            self._on_fault(error)

    def _run(self, work: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            work()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        _log.error("the checksums of a transfer cannot be taken", exc_info=error)
        self._has_failed = True
        self._on_fault(error)

    def _hash(self, shipped: Sequence[ShippedBlocks], hashed: list[FieldChecksums]) -> None:
        for piece, field_id, rank in _in_order(shipped, self._hasher.num_ranks):
            digests = self._hasher.digests(rank, field_id, piece.blocks, self._kind)
            hashed.append(_told(piece, field_id, rank, digests))

    def _note_landed(self, hashed: Sequence[FieldChecksums]) -> None:
        with self._lock:
            self._num_in_flight -= 1
            self._landed += hashed
            self._tell_landed()

    def _note_complete(self) -> None:
        with self._lock:
            self._is_complete = True
            self._tell_landed()

    def _tell_landed(self) -> None:
        """The caller holds the lock, so that parts are told of in their order."""
        is_last = self._is_complete and not self._num_in_flight
        if is_last or sum(item.num_blocks for item in self._landed) >= self._min_part_digests:
            for fields in _parts(self._landed):
                self._tell(Checksums(handoff_id=self._handoff_id, part=self._num_parts, fields=fields))
                self._num_parts += 1
            self._landed.clear()
        if is_last:
            self._tell(ChecksumsComplete(num_parts=self._num_parts))


def _in_order(shipped: Sequence[ShippedBlocks], num_ranks: int) -> Iterator[tuple[ShippedBlocks, str, int]]:
    """Every field of every piece for every rank of the peer."""
    for piece in shipped:
        for field_id in piece.field_ids:
            for rank in range(num_ranks):
                yield piece, field_id, rank


def _split(shipped: Sequence[ShippedBlocks], num_ranks: int, digests: bytes) -> list[FieldChecksums]:
    """`digests`: of every block, in the order of `_in_order`."""
    split: list[FieldChecksums] = []
    begin = 0
    for piece, field_id, rank in _in_order(shipped, num_ranks):
        end = begin + len(piece.blocks) * DIGEST_BYTES
        split.append(_told(piece, field_id, rank, digests[begin:end]))
        begin = end
    return split


def _told(piece: ShippedBlocks, field_id: str, rank: int, digests: bytes) -> FieldChecksums:
    return FieldChecksums(field_id=field_id, first_slot=piece.first_slot, digests=digests, tp_rank=rank)


def _parts(landed: Sequence[FieldChecksums]) -> Iterator[tuple[FieldChecksums, ...]]:
    """In order, as few as the limit allows."""
    part: list[FieldChecksums] = []
    num_digests = 0
    for item in landed:
        if part and num_digests + item.num_blocks > _MAX_PART_DIGESTS:
            yield tuple(part)
            part, num_digests = [], 0
        part.append(item)
        num_digests += item.num_blocks
    if part:
        yield tuple(part)
