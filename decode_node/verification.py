"""Compares what a transfer has left in our blocks with the checksums of its sender, before anything reads it.

Knows the arena and the grant; which handoffs are verified, and what a difference means for one, is decided elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from cache_runtime.transfer.checksums import BlockHasher, blocks_per_digest, fold
from cache_runtime.transfer.schema import LogicalManifest, RankPlacement
from node_runtime.handoff.messages import FieldChecksums, GroupGrant

_MAX_FIELDS_NAMED = 3


class TransferVerifier:
    """Chooses the handoffs to verify and counts them. `find_damage` is for worker threads, the rest for the loop's."""

    def __init__(self, logical: LogicalManifest, placement: RankPlacement, *, fraction: float, seed: int) -> None:
        """`fraction` of the handoffs are verified, 0 for none, 1 for all. `placement` is that of our own arena."""
        self._logical = logical
        self._hasher = BlockHasher(placement)
        self._fraction = fraction
        self._random = random.Random(seed)
        self.num_verified = 0
        self.num_damaged = 0

    def wants_next(self) -> bool:
        """Whether the next handoff is to be verified."""
        return self._random.random() < self._fraction

    def count(self, *, is_damaged: bool) -> None:
        """Notes the outcome of one verification."""
        self.num_verified += 1
        self.num_damaged += is_damaged

    def find_damage(self, groups: Sequence[GroupGrant], checksums: Sequence[FieldChecksums]) -> str:
        """Where our blocks are not what was sent; empty when they are. Blocking: reads every granted byte."""
        blocks = {group.group_id: group.block_ids for group in groups}
        told = {item.field_id: item.digests for item in checksums}
        num_blocks = [len(blocks[item.group_id]) for item in self._logical.fields]
        share = blocks_per_digest(num_blocks)
        damaged = [
            item.field_id
            for item in self._logical.fields
            if told.get(item.field_id) != fold(self._hasher.digests(item.field_id, blocks[item.group_id]), share)
        ]
        if not damaged:
            return ""
        more = f" and {len(damaged) - _MAX_FIELDS_NAMED} more" if len(damaged) > _MAX_FIELDS_NAMED else ""
        return f"the cache differs from what was sent in {', '.join(damaged[:_MAX_FIELDS_NAMED])}{more}"
