"""What planes whose receiver places the bytes promise on top: nothing lands but what is granted at that instant."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from integration.data_plane.conftest import MEMORY_BYTES, PLANES
from integration.data_plane.planes import Memory, Peer, Plane, ProcessPeer, spans_of

from cache_runtime.transfer.engine import (
    KEY_BYTES,
    NO_KEY,
    EngineClosed,
    PeerLink,
    PeerUnreachable,
    PlaneKind,
    Region,
    Run,
    TransferEngine,
    TransferError,
    TransferRefused,
    TransferRejected,
    TransferRevoked,
)

KIB = 1 << 10
PATIENCE_S = 30.0
# TLS changes nothing behind the socket: the conformance suite is enough for it.
FENCED = tuple(name for name in PLANES if name not in ("memory", "mooncake", "stream with TLS"))


pytestmark = pytest.mark.parametrize("plane", FENCED, indirect=True, scope="session")


@pytest.fixture
def link(engine: TransferEngine, peer: Peer) -> PeerLink:
    return engine.open_peer(peer.endpoint, [peer.region, peer.probe_region])


@pytest.fixture
def key(peer: Peer) -> Iterator[bytes]:
    """A key of one's own: the shared peer outlives the test."""
    return secrets.token_bytes(KEY_BYTES)


def part(peer: Peer, offset: int, num_bytes: int) -> Region:
    return Region(base_address=peer.region.base_address + offset, num_bytes=num_bytes)


def run(source: Memory, source_offset: int, peer: Peer, target_offset: int, length_bytes: int) -> Run:
    return Run(source.region.base_address + source_offset, peer.region.base_address + target_offset, length_bytes)


def test_nothing_lands_that_was_never_granted_and_the_link_goes_on(
    link: PeerLink, source: Memory, peer: Peer, key: bytes
) -> None:
    before = peer.num_refused_runs()
    with pytest.raises(TransferRefused, match=peer.endpoint):
        link.write([run(source, 0, peer, 0, 64 * KIB)], key=key, timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert not peer.memory.array.any()
    assert peer.num_refused_runs() == before + 1
    link.write([run(source, 0, peer, 0, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert np.array_equal(peer.memory.array[:KIB], source.array[:KIB])


def test_of_a_write_exactly_the_granted_runs_land(link: PeerLink, source: Memory, peer: Peer, key: bytes) -> None:
    peer.allow(key, part(peer, 4096, 4096), part(peer, 16384, 4096))
    offsets = (0, 4096, 8192, 16384, 20480)
    write = link.write([run(source, at, peer, at, 4096) for at in offsets], key=key, timeout_s=PATIENCE_S)
    with pytest.raises(TransferRefused, match=r"3 .* not granted"):
        write.result(PATIENCE_S)
    expected = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    for at in (4096, 16384):
        expected[at : at + 4096] = source.array[at : at + 4096]
    assert np.array_equal(peer.memory.array, expected)
    peer.revoke(key)


@pytest.mark.parametrize(("begin", "num_bytes"), [(4095, 2), (8191, 2), (4095, 4098), (4096, 4097), (0, 4097)])
def test_a_run_that_is_granted_in_part_only_does_not_land_at_all(
    link: PeerLink, source: Memory, peer: Peer, key: bytes, begin: int, num_bytes: int
) -> None:
    peer.allow(key, part(peer, 4096, 4096))
    write = link.write([run(source, 0, peer, begin, num_bytes)], key=key, timeout_s=PATIENCE_S)
    with pytest.raises(TransferRefused):
        write.result(PATIENCE_S)
    assert not peer.memory.array.any()
    peer.revoke(key)


def test_a_run_may_cross_spans_that_lie_side_by_side(engine: TransferEngine, source: Memory, doomed_peer: Peer) -> None:
    link = engine.open_peer(doomed_peer.endpoint, [doomed_peer.region])
    key = secrets.token_bytes(KEY_BYTES)
    doomed_peer.allow(key, part(doomed_peer, 0, 12288))
    link.write([run(source, 0, doomed_peer, 0, 12288)], key=key, timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert np.array_equal(doomed_peer.memory.array[:12288], source.array[:12288])


def test_the_key_of_one_grant_opens_no_other(link: PeerLink, source: Memory, peer: Peer, key: bytes) -> None:
    other = secrets.token_bytes(KEY_BYTES)
    peer.allow(key, part(peer, 0, 4096))
    peer.allow(other, part(peer, 4096, 4096))
    with pytest.raises(TransferRefused):
        link.write([run(source, 0, peer, 4096, 4096)], key=key, timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert not peer.memory.array.any()
    link.write([run(source, 0, peer, 4096, 4096)], key=other, timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert peer.memory.array[4096:8192].all()
    peer.revoke(key)
    peer.revoke(other)


def test_after_a_revocation_nothing_lands(link: PeerLink, source: Memory, peer: Peer, key: bytes) -> None:
    peer.allow(key, peer.region)
    link.write([run(source, 0, peer, 0, KIB)], key=key, timeout_s=PATIENCE_S).result(PATIENCE_S)
    peer.revoke(key)
    with pytest.raises(TransferRefused):
        link.write([run(source, 0, peer, KIB, KIB)], key=key, timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert peer.memory.array[:KIB].all()
    assert not peer.memory.array[KIB:].any()


def test_a_revocation_in_the_middle_of_writes_is_the_last_change_of_the_memory(
    link: PeerLink, source: Memory, peer: Peer, key: bytes
) -> None:
    peer.allow(key, peer.region)
    size = 256 * KIB
    runs = [run(source, at, peer, at, size) for at in range(0, MEMORY_BYTES, size)]
    writes = [link.write([one], key=key, timeout_s=PATIENCE_S) for one in runs]
    writes[3].result(PATIENCE_S)
    peer.revoke(key)
    seen = peer.memory.array.copy()
    outcomes = [write.exception(PATIENCE_S) for write in writes]
    assert np.array_equal(peer.memory.array, seen)
    for one, outcome in zip(runs, outcomes, strict=True):
        at = one.target_address - peer.region.base_address
        if outcome is None:
            assert np.array_equal(seen[at : at + size], source.array[at : at + size]), "a write that ended well landed"
        else:
            assert isinstance(outcome, TransferRefused)


def test_a_grant_can_come_and_go_under_the_same_key(link: PeerLink, source: Memory, peer: Peer, key: bytes) -> None:
    for offset in (0, 4096):
        peer.allow(key, part(peer, offset, 4096))
        link.write([run(source, 0, peer, offset, 4096)], key=key, timeout_s=PATIENCE_S).result(PATIENCE_S)
        peer.revoke(key)
    assert peer.memory.array[:8192].all()


def test_what_cannot_be_allowed_is_refused(engine: TransferEngine, source: Memory) -> None:
    base, key = source.region.base_address, bytes(range(KEY_BYTES))
    permit = engine.allow(key, spans_of(source.region))
    with pytest.raises(ValueError, match="live grant"):
        engine.allow(key, spans_of(source.region))
    permit.revoke()
    permit.revoke()
    engine.allow(key, spans_of(source.region)).revoke()
    for spans, reason in (
        (np.array([[base - 1, base + 1]]), "outside this engine's registered memory"),
        (np.array([[base, base]]), "empty"),
        (np.array([[base, -1]]), "empty"),
        (np.array([[base, (1 << 62) + 1]]), "outside of"),
        (np.zeros((0, 2), dtype=np.int64), "at least 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            engine.allow(key, spans)
    with pytest.raises(ValueError, match="15 bytes given, 16 required"):
        engine.allow(key[1:], spans_of(source.region))


def test_a_key_of_the_wrong_length_is_rejected_before_anything_is_sent(
    link: PeerLink, source: Memory, peer: Peer, plane: Plane
) -> None:
    if plane.name == "memory":
        pytest.skip("keys of a fabric are looked up, not sent")
    with pytest.raises(TransferRejected, match="3 bytes given"):
        link.write([run(source, 0, peer, 0, KIB)], key=b"abc", timeout_s=PATIENCE_S).result(PATIENCE_S)


def test_a_closed_engine_allows_nothing(engine: TransferEngine, source: Memory) -> None:
    engine.close()
    with pytest.raises(EngineClosed):
        engine.allow(NO_KEY, spans_of(source.region))


def test_a_late_revocation_after_a_new_grant_of_the_key_leaves_that_one_alone(
    engine: TransferEngine, source: Memory
) -> None:
    first = engine.allow(NO_KEY, spans_of(source.region))
    first.revoke()
    engine.allow(NO_KEY, spans_of(source.region))
    first.revoke()
    with pytest.raises(ValueError, match="live grant"):
        engine.allow(NO_KEY, spans_of(source.region))


def test_a_write_that_is_no_longer_wanted_ends_and_the_link_goes_on(
    engine: TransferEngine, source: Memory, doomed_peer: Peer, plane: Plane
) -> None:
    if plane.name == "memory":
        pytest.skip("every run counts as posted at once")
    link = engine.open_peer(doomed_peer.endpoint, [doomed_peer.region])
    size = 8 << 20
    runs = [run(source, at, doomed_peer, at % size, size) for at in range(0, MEMORY_BYTES - size, size)]
    # Far more than may be under way at once; the peer sleeps, so the rest cannot be posted.
    doomed_peer.freeze()
    wanted = [True]
    writes = [link.write([one], timeout_s=PATIENCE_S, is_wanted=lambda: wanted[0]) for one in runs]
    wanted[0] = False
    assert isinstance(writes[-1].exception(PATIENCE_S), TransferRevoked)
    doomed_peer.kill()
    assert all(isinstance(write.exception(PATIENCE_S), TransferError) for write in writes)


def test_a_peer_restarted_at_the_same_endpoint_is_a_new_peer(
    plane: Plane, engine: TransferEngine, source: Memory, tmp_path: Path
) -> None:
    if not plane.can_restart:
        pytest.skip("endpoints of this plane cannot be chosen")
    old = plane.start_peer(1 << 20)
    link = engine.open_peer(old.endpoint, [old.region])
    old.kill()
    with pytest.raises(PeerUnreachable):
        engine.open_peer(old.endpoint, [old.region])
    new = plane.start_peer(1 << 20, old.endpoint)
    assert new.endpoint == old.endpoint
    with pytest.raises(TransferError):
        link.write([run(source, 0, old, 0, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert not new.memory.array.any()
    fresh = engine.open_peer(new.endpoint, [new.region])
    fresh.write([run(source, 0, new, 0, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert np.array_equal(new.memory.array[:KIB], source.array[:KIB])
    new.kill()


def test_a_stopped_peer_holds_up_no_other_and_is_given_up_in_time(
    engine: TransferEngine, link: PeerLink, source: Memory, peer: Peer, doomed_peer: Peer
) -> None:
    if not isinstance(doomed_peer, ProcessPeer):
        pytest.skip("a fabric holds without a limit")
    stuck_link = engine.open_peer(doomed_peer.endpoint, [doomed_peer.region])
    doomed_peer.freeze()
    stuck = stuck_link.write([run(source, 0, doomed_peer, 0, 8 << 20)], timeout_s=PATIENCE_S)
    for _ in range(5):
        link.write([run(source, 0, peer, 0, 1 << 20)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert not stuck.done()
    with pytest.raises(TransferError, match=r"no progress within 2"):
        stuck.result(PATIENCE_S)
    with pytest.raises(PeerUnreachable, match=r"no answer within 2\.0 s"):
        engine.open_peer(doomed_peer.endpoint, [doomed_peer.region])


def test_every_plane_says_which_kind_it_is(plane: Plane, engine: TransferEngine) -> None:
    assert engine.kind is plane.kind is PlaneKind.TWO_SIDED
    assert engine.drain_bound_s == 0.0
