"""What of our memory the peer of one handoff may fill at this moment, where the data plane lets the receiver say so.

It opens before the grant is sent and closes before the scheduler hears anything that could give the blocks to somebody
else. On a one-sided plane it holds nobody up, and quarantine does the same more slowly.
"""

from __future__ import annotations

import logging

import numpy as np

from cache_runtime.transfer.block_spans import block_spans
from cache_runtime.transfer.engine import XXH3, EngineClosed, Permit, PlaneKind, Spans, StandingPermit, TransferEngine
from cache_runtime.transfer.schema import PlacementManifest
from node_runtime.handoff.events import AbortScheduling, DecodeAction, MarkDone, MarkQuiesced, Send
from node_runtime.handoff.messages import Grant

_log = logging.getLogger(__name__)


class GrantFence:
    """The permit of one handoff."""

    def __init__(self, plane: TransferEngine, manifest: PlacementManifest, handoff_id: bytes) -> None:
        """`manifest`: where this node's blocks lie, on all of its tensor ranks."""
        self._plane = plane
        self._manifest = manifest
        self._handoff_id = handoff_id
        self._hashed_as: str | None = None
        self._permit: Permit | None = None
        self._is_closed = False

    @property
    def holds(self) -> bool:
        """Whether nothing can land once the fence is closed, whatever the writer does."""
        return self._plane.kind is PlaneKind.TWO_SIDED

    def hash_as(self, kind: str) -> None:
        """Before the grant: what arrives is to be hashed, see `digests`."""
        self._hashed_as = kind

    def follow(self, action: DecodeAction) -> None:
        """Before the action of the session is carried out."""
        if isinstance(action, Send) and isinstance(action.message, Grant):
            self._open(action.message)
        elif isinstance(action, MarkDone | AbortScheduling | MarkQuiesced):
            self.close()

    def _open(self, grant: Grant) -> None:
        blocks = {group.group_id: group.block_ids for group in grant.groups}
        spans = np.concatenate([block_spans(self._manifest.logical, rank, blocks) for rank in self._manifest.ranks])
        if self._permit is not None or not len(spans):
            return
        try:
            self._permit = self._plane.allow(self._handoff_id, spans, hashed_as=self._hashed_as)
        except EngineClosed as error:
            # The node stops; what the peer writes is refused.
            _log.info("the grant of a handoff cannot be filled any more: %s", error)

    def close(self) -> None:
        """Nothing more may be filled. Idempotent."""
        if self._permit is not None and not self._is_closed:
            self._is_closed = True
            self._permit.revoke()

    def digests(self, blocks: Spans) -> bytes:
        """8 bytes per block: what it holds now, without reading again what was hashed when it arrived. Any thread."""
        permit = StandingPermit() if self._permit is None else self._permit
        return permit.digests(blocks, self._hashed_as or XXH3)
