"""Checksums of what one handoff ships: taken block by block beside the transfer, on a thread of their own.

The engine thread says which blocks it posts; their rows are never modified after that, so it does not matter when they
are hashed. What comes out covers exactly the granted slots. It knows no gRPC and no session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

from cache_runtime.transfer.checksums import DIGEST_BYTES, BlockHasher, blocks_per_digest, fold
from cache_runtime.transfer.schema import LogicalManifest
from node_runtime.handoff.messages import FieldChecksums, Grant

_log = logging.getLogger(__name__)


class TransferChecksums:
    """The checksums of one handoff. `add` and `complete` belong to the engine thread."""

    def __init__(
        self,
        hasher: BlockHasher,
        executor: Executor,
        *,
        granted_slots: Mapping[str, tuple[int, int]],
        on_complete: Callable[[tuple[FieldChecksums, ...]], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        """
        Args:
            executor: One thread, so that the work of a handoff is done in the order in which it came.
            granted_slots: By field, the [first, end) of its granted slots.
            on_complete: Hears the checksums, on the executor's thread.
            on_fault: Hears why there are none, there too.
        """
        self._hasher = hasher
        self._executor = executor
        self._granted_slots = granted_slots
        self._digests = {
            field_id: bytearray((end - first) * DIGEST_BYTES) for field_id, (first, end) in granted_slots.items()
        }
        self._on_complete = on_complete
        self._on_fault = on_fault
        self._has_failed = False

    def add(self, field_ids: Sequence[str], first_slot: int, blocks: Sequence[int]) -> None:
        """These blocks of these fields, for the slots from `first_slot` on, are complete."""
        self._submit(lambda: self._hash(field_ids, first_slot, blocks))

    def complete(self) -> None:
        """Nothing more is added."""
        self._submit(lambda: self._on_complete(self._collect()))

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

    def _hash(self, field_ids: Sequence[str], first_slot: int, blocks: Sequence[int]) -> None:
        for field_id in field_ids:
            begin = (first_slot - self._granted_slots[field_id][0]) * DIGEST_BYTES
            digests = self._hasher.digests(field_id, blocks)
            self._digests[field_id][begin : begin + len(digests)] = digests

    def _collect(self) -> tuple[FieldChecksums, ...]:
        share = blocks_per_digest([end - first for first, end in self._granted_slots.values()])
        return tuple(
            FieldChecksums(field_id=field_id, digests=fold(bytes(digests), share))
            for field_id, digests in self._digests.items()
        )


def granted_slots(logical: LogicalManifest, grant: Grant) -> dict[str, tuple[int, int]]:
    """By field, the [first, end) of the slots that the grant names for the field's group."""
    by_group = {group.group_id: (group.first_slot, group.end_slot) for group in grant.groups}
    return {item.field_id: by_group[item.group_id] for item in logical.fields}
