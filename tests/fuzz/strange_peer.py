"""A decode node that is memory and messages only: what a prefill node must be safe from.

Its arena lies between margins that no manifest names, so that a write beside what was granted shows.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from pdmesh.v1 import handoff_pb2, inference_pb2, prefill_pb2

from cache_runtime.transfer.memory_engine import MemoryEngine, MemoryFabric
from cache_runtime.transfer.schema import PlacementManifest
from node_runtime.handoff.checks import GrantedGroup
from node_runtime.handoff.probe import NONCE_BYTES
from node_runtime.wire.manifest import manifest_to_proto

MARGIN_BYTES = 4096
UNTOUCHED = 0x5A
LEASE_MS = 2000


class StrangePeer:
    """Takes every write into what it has registered, as memory without a fence does."""

    def __init__(self, fabric: MemoryFabric, like: PlacementManifest) -> None:
        """`like` is the manifest of a decode node that the prefill node gets along with."""
        placement = like.ranks[0]
        arena_bytes = placement.arena_bytes
        self._memory = np.full(arena_bytes + 2 * MARGIN_BYTES + NONCE_BYTES, UNTOUCHED, dtype=np.uint8)
        base = int(self._memory.ctypes.data)
        self._engine = MemoryEngine(fabric)
        self._arena_base = base + MARGIN_BYTES
        self._nonce_address = self._arena_base + arena_bytes + MARGIN_BYTES
        self._engine.register(self._arena_base, arena_bytes)
        self._engine.register(self._nonce_address, NONCE_BYTES)
        own = dataclasses.replace(
            placement, arena_base=self._arena_base, endpoint=self._engine.endpoint, data_plane="memory", planes=()
        )
        self.manifest = PlacementManifest(logical=like.logical, ranks=(own,))
        self._arena_bytes = arena_bytes
        self._serials = itertools.count(1)

    def close(self) -> None:
        self._engine.close()

    def introduction(self, incarnation: int) -> prefill_pb2.BootstrapRequest:
        return prefill_pb2.BootstrapRequest(
            node_id=f"strange-{incarnation}",
            incarnation=incarnation,
            manifest=manifest_to_proto(self.manifest),
            nonce=bytes(range(NONCE_BYTES)),
            nonce_address=self._nonce_address,
        )

    def conversation(
        self, prompt: list[int], incarnation: int, prefill_incarnation: int, *, wants_checksums: bool
    ) -> list[handoff_pb2.HandoffRequest]:
        """Start, Grant, Renewed and Abort of one sound handoff, under names that were never used."""
        serial = next(self._serials)
        handoff_id = serial.to_bytes(16, "big")
        start = handoff_pb2.Start(
            handoff_id=handoff_id,
            request_id=f"strange-{serial}",
            token_ids=prompt,
            sampling=inference_pb2.SamplingParams(seed=1),
            decode_incarnation=incarnation,
            prefill_incarnation=prefill_incarnation,
            lease_ms=LEASE_MS,
            wants_checksums=wants_checksums,
        )
        groups = []
        for group in self.manifest.logical.groups:
            num_blocks = self.manifest.ranks[0].find_num_blocks(group.group_id) or 0
            first, end = GrantedGroup.of(group, num_blocks).slots(0, len(prompt))
            # The upper half of the blocks is never granted.
            ids = [1 + (serial + slot) % (num_blocks // 2 - 1) for slot in range(first, end)]
            groups.append(handoff_pb2.GroupGrant(group_id=group.group_id, first_slot=first, block_ids=ids))
        grant = handoff_pb2.Grant(handoff_id=handoff_id, from_token=0, groups=groups, lease_ms=LEASE_MS)
        return [
            handoff_pb2.HandoffRequest(start=start),
            handoff_pb2.HandoffRequest(grant=grant),
            handoff_pb2.HandoffRequest(renewed=handoff_pb2.Renewed(handoff_id=handoff_id, beat=1)),
            handoff_pb2.HandoffRequest(abort=handoff_pb2.Abort(handoff_id=handoff_id, reason="tired")),
        ]

    def assert_margins_untouched(self) -> None:
        begin, end = MARGIN_BYTES, MARGIN_BYTES + self._arena_bytes
        assert (self._memory[:begin] == UNTOUCHED).all()
        assert (self._memory[end : end + MARGIN_BYTES] == UNTOUCHED).all()

    def assert_null_blocks_untouched(self) -> None:
        """No sound grant names them."""
        for field in self.manifest.ranks[0].fields:
            null_block = self._memory[MARGIN_BYTES + field.offset_bytes :][: field.block_bytes]
            assert (null_block == UNTOUCHED).all(), field.field_id
