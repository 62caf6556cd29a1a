"""Compares what a transfer has left in our blocks with the checksums of its sender, before anything reads it.

Knows the arena and the grant; which handoffs are verified, and what a difference means for one, is decided elsewhere.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cache_runtime.transfer.checksums import RUNNABLE_DIGEST_KINDS, BlockHasher
from cache_runtime.transfer.engine import Spans
from cache_runtime.transfer.schema import LogicalManifest, RankPlacement
from node_runtime.handoff.messages import XXH3, Checksums, GroupGrant


class TransferVerifier:
    """Chooses the handoffs to verify and counts them. `find_damage` is for worker threads, the rest for the loop's."""

    def __init__(self, logical: LogicalManifest, ranks: Sequence[RankPlacement], *, fraction: float, seed: int) -> None:
        """`fraction` of the handoffs are verified, 0 for none, 1 for all. `ranks` are those of our own arenas."""
        self._group_of = {item.field_id: item.group_id for item in logical.fields}
        # One for each field, on each rank.
        self.digests_per_block: Mapping[str, int] = Counter(list(self._group_of.values()) * len(ranks))
        # What it can compare beside XXH3, the fastest first.
        self.digest_kinds = tuple(kind for kind in RUNNABLE_DIGEST_KINDS if kind != XXH3)
        self._hashers = tuple(BlockHasher(rank) for rank in ranks)
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

    def find_damage(self, groups: Sequence[GroupGrant], checksums: Checksums, digest: Callable[[Spans], bytes]) -> str:
        """Where our blocks are not what was sent; empty when they are. Blocking: `digest` may read all of them."""
        granted = {group.group_id: group for group in groups}
        spans: list[Spans] = []
        for told in checksums.fields:
            group = granted.get(self._group_of.get(told.field_id, ""))
            if group is None or told.first_slot < group.first_slot or told.end_slot > group.end_slot:
                return f"checksums came for what was not granted: {told.where}"
            if told.tp_rank >= len(self._hashers):
                return f"checksums came for what was not granted: {told.where}"
            blocks = group.block_ids[told.first_slot - group.first_slot : told.end_slot - group.first_slot]
            spans.append(self._hashers[told.tp_rank].spans(told.field_id, blocks))
        digests = digest(np.concatenate(spans)) if spans else b""
        begin = 0
        for told in checksums.fields:
            if digests[begin : begin + len(told.digests)] != told.digests:
                return f"the cache differs from what was sent in {told.where}"
            begin += len(told.digests)
        return ""
