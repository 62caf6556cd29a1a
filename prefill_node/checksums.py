"""Checksums of what one handoff ships: taken and sent block by block beside the transfer, on a thread of their own.

The engine thread says which blocks it is about to post; their rows are never modified after that, so it does not matter
when they are hashed. They are told of once they have landed, so that the receiver can compare them while others are on
their way. It knows no gRPC and no session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeAlias

from cache_runtime.transfer.checksums import BlockHasher
from node_runtime.handoff.messages import Checksums, FieldChecksums

_log = logging.getLogger(__name__)

# How many blocks of fields one message is about: enough to be rare, few enough to be compared long before the last ones
# land. The upper limit keeps a message far below what gRPC takes.
_MIN_PART_DIGESTS = 256
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
        hasher: BlockHasher,
        executor: Executor,
        *,
        handoff_id: bytes,
        tell: Callable[[ChecksumNews], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        """
        Args:
            executor: One thread, so that the work of a handoff is done in the order in which it came.
            tell: Hears the checksums, on the executor's thread.
            on_fault: Hears why there are none, there too.
        """
        self._hasher = hasher
        self._executor = executor
        self._handoff_id = handoff_id
        self._tell = tell
        self._on_fault = on_fault
        # Touched on the executor's thread only.
        self._has_failed = False
        self._is_complete = False
        self._num_in_flight = 0
        self._num_parts = 0
        self._landed: list[FieldChecksums] = []

    def posting(self, shipped: Sequence[ShippedBlocks]) -> Callable[[], None]:
        """Has these blocks hashed. Call what is returned, on any thread, when they have landed."""
        hashed: list[FieldChecksums] = []
        self._submit(lambda: self._hash(shipped, hashed))
        return lambda: self._submit(lambda: self._note_landed(hashed))

    def complete(self) -> None:
        """Nothing more is posted."""
        self._submit(self._note_complete)

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
            _log.exception("the checksums of a transfer cannot be taken")
            self._has_failed = True
            self._on_fault(error)

    def _hash(self, shipped: Sequence[ShippedBlocks], hashed: list[FieldChecksums]) -> None:
        self._num_in_flight += 1
        for piece in shipped:
            for field_id in piece.field_ids:
                digests = self._hasher.digests(field_id, piece.blocks)
                hashed.append(FieldChecksums(field_id=field_id, first_slot=piece.first_slot, digests=digests))

    def _note_landed(self, hashed: list[FieldChecksums]) -> None:
        self._num_in_flight -= 1
        self._landed += hashed
        self._tell_landed()

    def _note_complete(self) -> None:
        self._is_complete = True
        self._tell_landed()

    def _tell_landed(self) -> None:
        is_last = self._is_complete and not self._num_in_flight
        if is_last or sum(item.num_blocks for item in self._landed) >= _MIN_PART_DIGESTS:
            for fields in _parts(self._landed):
                self._tell(Checksums(handoff_id=self._handoff_id, part=self._num_parts, fields=fields))
                self._num_parts += 1
            self._landed.clear()
        if is_last:
            self._tell(ChecksumsComplete(num_parts=self._num_parts))


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
