"""What one follower of a node is told, update by update. Sans-IO: statuses come in, updates go out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pdmesh.v1 import mesh_pb2

from node_runtime.errors import InvalidRequest
from node_runtime.prefix_feed import MAX_KEYS_PER_CHANGE, PrefixChange, PrefixFeed

DEFAULT_INTERVAL_MS: Final = 250
MIN_INTERVAL_MS: Final = 10
MAX_INTERVAL_MS: Final = 60_000


def interval_s_of(request: mesh_pb2.FollowRequest) -> float:
    """Least time between two updates. Raises InvalidRequest."""
    interval_ms = request.interval_ms or DEFAULT_INTERVAL_MS
    if not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
        limits = f"[{MIN_INTERVAL_MS}, {MAX_INTERVAL_MS}]"
        raise InvalidRequest(f"interval_ms: {interval_ms} given, 0 or a number in {limits} required")
    return interval_ms / 1000


class UpdateStream:
    """The updates of one stream."""

    def __init__(self, request: mesh_pb2.FollowRequest, *, incarnation: int, feed: PrefixFeed | None) -> None:
        """`feed` is None on a node without a cache."""
        self._incarnation = incarnation
        self._feed = feed if request.wants_prefixes else None
        self._sequence = request.prefix_sequence if request.incarnation == incarnation else 0
        self._told: mesh_pb2.NodeStatus | None = None

    def updates(self, status: mesh_pb2.NodeStatus) -> Iterator[mesh_pb2.NodeUpdate]:
        """What is new since the last call; nothing when nothing is."""
        first: mesh_pb2.NodeStatus | None = None if status == self._told else status
        self._told = status
        for change in self._prefix_changes():
            yield mesh_pb2.NodeUpdate(incarnation=self._incarnation, status=first, prefixes=change_to_proto(change))
            first = None
        if first is not None:
            yield mesh_pb2.NodeUpdate(incarnation=self._incarnation, status=first)

    def _prefix_changes(self) -> Iterator[PrefixChange]:
        if self._feed is None:
            return
        changes = self._feed.changes_since(self._sequence)
        # They are told to the end before the next call.
        self._sequence = self._feed.sequence
        yield from changes


def change_to_proto(change: PrefixChange) -> mesh_pb2.PrefixChanges:
    """The message of one change."""
    return mesh_pb2.PrefixChanges(
        sequence=change.sequence,
        base_sequence=change.base_sequence,
        is_snapshot=change.is_snapshot,
        removed=change.removed,
        stored=change.stored,
    )


def change_from_proto(message: mesh_pb2.PrefixChanges) -> PrefixChange:
    """Raises InvalidRequest when the message breaks a rule of mesh.proto."""
    num_keys = len(message.removed) + len(message.stored)
    if num_keys > MAX_KEYS_PER_CHANGE:
        raise InvalidRequest(f"prefixes: {num_keys} keys given, at most {MAX_KEYS_PER_CHANGE} allowed")
    try:
        return PrefixChange(
            sequence=message.sequence,
            base_sequence=message.base_sequence,
            is_snapshot=message.is_snapshot,
            removed=tuple(message.removed),
            stored=tuple(message.stored),
        )
    except ValueError as error:
        raise InvalidRequest(f"prefixes: {error}") from None
