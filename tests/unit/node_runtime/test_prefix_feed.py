"""A listener that applies what a feed tells it has the node's set of keys, however late it asks."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from pdmesh.v1 import mesh_pb2

from node_runtime.errors import InvalidRequest
from node_runtime.node_updates import UpdateStream, change_from_proto, change_to_proto, interval_s_of
from node_runtime.prefix_feed import MAX_KEYS_PER_CHANGE, PrefixChange, PrefixFeed


class Listener:
    """Applies changes by the rules of mesh.proto."""

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self.sequence = 0
        self.num_snapshots = 0

    def take(self, changes: Iterable[PrefixChange]) -> None:
        for change in changes:
            if change.is_snapshot:
                self.num_snapshots += 1
                self.keys.clear()
                self.sequence = 0
            assert change.base_sequence == self.sequence
            self.keys -= set(change.removed)
            self.keys |= set(change.stored)
            self.sequence = change.sequence


def test_listeners_of_any_slowness_end_up_with_the_same_keys() -> None:
    rng = random.Random(1)
    feed = PrefixFeed(max_remembered_keys=40)
    keys: set[int] = set()
    listeners = [Listener() for _ in range(4)]
    for step in range(600):
        if rng.random() < 0.01:
            keys.clear()
            feed.apply(is_cleared=True, removed=(), stored=())
        removed = rng.sample(sorted(keys), min(len(keys), rng.randrange(3)))
        stored = [rng.randrange(200) for _ in range(rng.randrange(4))]
        keys = (keys - set(removed)) | set(stored)
        feed.apply(is_cleared=False, removed=removed, stored=stored)
        for slowness, listener in enumerate(listeners, start=1):
            if step % slowness**3 == 0:
                listener.take(feed.changes_since(listener.sequence))
                assert listener.keys == keys
    assert [listener.num_snapshots for listener in listeners[:1]] <= [8]
    assert listeners[0].num_snapshots < listeners[3].num_snapshots


def test_who_keeps_up_is_told_the_difference_and_who_has_nothing_the_whole() -> None:
    feed = PrefixFeed()
    feed.apply(is_cleared=False, removed=(), stored=(1, 2, 3))
    (whole,) = feed.changes_since(0)
    assert (whole.is_snapshot, whole.base_sequence, whole.stored) == (True, 0, (1, 2, 3))
    feed.apply(is_cleared=False, removed=(2,), stored=(4,))
    (difference,) = feed.changes_since(whole.sequence)
    assert (difference.is_snapshot, difference.removed, difference.stored) == (False, (2,), (4,))
    assert difference.base_sequence == whole.sequence
    assert list(feed.changes_since(feed.sequence)) == []
    # A listener that claims more than there was gets the whole, too.
    (whole,) = feed.changes_since(feed.sequence + 5)
    assert whole.is_snapshot
    assert set(whole.stored) == {1, 3, 4}


def test_a_large_set_comes_in_parts_of_which_only_the_last_moves_the_number() -> None:
    feed = PrefixFeed()
    feed.apply(is_cleared=False, removed=(), stored=range(2 * MAX_KEYS_PER_CHANGE + 1))
    parts = list(feed.changes_since(0))
    assert [part.is_snapshot for part in parts] == [True, False, False]
    assert [part.sequence for part in parts] == [0, 0, feed.sequence]
    listener = Listener()
    listener.take(parts)
    assert len(listener.keys) == 2 * MAX_KEYS_PER_CHANGE + 1


def _stream(feed: PrefixFeed, **fields: int) -> UpdateStream:
    request = mesh_pb2.FollowRequest(wants_prefixes=True, **fields)
    return UpdateStream(request, incarnation=7, feed=feed)


def test_an_update_has_what_is_new_and_nothing_else() -> None:
    feed = PrefixFeed()
    stream = _stream(feed)
    status = mesh_pb2.NodeStatus(serving=True)
    (first,) = stream.updates(status)
    assert (first.incarnation, first.status.serving, first.prefixes.is_snapshot) == (7, True, True)
    assert list(stream.updates(status)) == []
    feed.apply(is_cleared=False, removed=(), stored=(5,))
    (second,) = stream.updates(status)
    assert not second.HasField("status")
    assert list(second.prefixes.stored) == [5]
    (third,) = stream.updates(mesh_pb2.NodeStatus(serving=True, draining=True))
    assert third.status.draining
    assert not third.HasField("prefixes")


def test_a_new_stream_goes_on_where_the_last_one_ended_unless_the_node_is_another_process() -> None:
    feed = PrefixFeed()
    feed.apply(is_cleared=False, removed=(), stored=(5,))
    status = mesh_pb2.NodeStatus()
    (same,) = _stream(feed, incarnation=7, prefix_sequence=feed.sequence).updates(status)
    assert not same.HasField("prefixes")
    (other,) = _stream(feed, incarnation=8, prefix_sequence=feed.sequence).updates(status)
    assert other.prefixes.is_snapshot


def test_changes_survive_the_wire_and_those_that_make_no_sense_are_refused() -> None:
    change = PrefixChange(sequence=4, base_sequence=3, is_snapshot=False, removed=(1,), stored=(2**64 - 1,))
    assert change_from_proto(change_to_proto(change)) == change
    with pytest.raises(InvalidRequest, match="at least base_sequence=5"):
        change_from_proto(mesh_pb2.PrefixChanges(sequence=4, base_sequence=5))
    with pytest.raises(InvalidRequest, match="a snapshot begins at 0"):
        change_from_proto(mesh_pb2.PrefixChanges(sequence=4, base_sequence=3, is_snapshot=True))
    with pytest.raises(InvalidRequest, match=f"{MAX_KEYS_PER_CHANGE + 1} keys given"):
        change_from_proto(mesh_pb2.PrefixChanges(sequence=1, stored=range(MAX_KEYS_PER_CHANGE + 1)))


def test_the_interval_is_bounded() -> None:
    assert interval_s_of(mesh_pb2.FollowRequest()) == 0.25
    for interval_ms in (9, 60_001):
        with pytest.raises(InvalidRequest, match="interval_ms"):
            interval_s_of(mesh_pb2.FollowRequest(interval_ms=interval_ms))
