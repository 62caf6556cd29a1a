"""What every data plane promises, run against each of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from integration.data_plane.planes import Memory, Peer, Plane, spans_of

from cache_runtime.transfer.engine import (
    NO_KEY,
    EngineClosed,
    PeerLink,
    PeerUnreachable,
    Region,
    Run,
    TransferEngine,
    TransferError,
    TransferRejected,
    TransferTimeout,
)
from cache_runtime.transfer.planner import coalesce

KIB = 1 << 10
NUM_SCATTERED = 20_000
# Far above what any of these should take, far below the minute for which a bare native call hangs.
PATIENCE_S = 30.0


def run(source: Memory, source_offset: int, peer: Peer, target_offset: int, length_bytes: int) -> Run:
    return Run(source.region.base_address + source_offset, peer.region.base_address + target_offset, length_bytes)


def scattered(source: Memory, peer: Peer, num_runs: int, run_bytes: int) -> tuple[list[Run], np.ndarray]:
    """Runs from ascending sources to shuffled targets, and the target index of each."""
    targets = np.random.default_rng(3).permutation(num_runs)
    runs = [run(source, i * run_bytes, peer, int(t) * run_bytes, run_bytes) for i, t in enumerate(targets)]
    return runs, targets


@pytest.fixture
def link(engine: TransferEngine, peer: Peer) -> PeerLink:
    return engine.open_peer(peer.endpoint, [peer.region, peer.probe_region])


def test_an_engine_says_what_it_is(plane: Plane, engine: TransferEngine, link: PeerLink, peer: Peer) -> None:
    assert engine.name == plane.name
    assert engine.kind is plane.kind
    assert engine.drain_bound_s >= 0
    assert link.peer == peer.endpoint != engine.endpoint


def test_runs_of_any_size_land_where_they_were_sent_and_nowhere_else(
    link: PeerLink, source: Memory, peer: Peer
) -> None:
    pieces = [(11, 5, 1), (100, 77, 63), (5000, 4096, 4 * KIB), (70_001, 65_536, 300 * KIB + 1), (0, 1 << 20, 9 << 20)]
    report = link.write([run(source, s, peer, t, n) for s, t, n in pieces], timeout_s=PATIENCE_S).result(PATIENCE_S)
    expected = np.zeros(peer.memory.array.size, dtype=np.uint8)
    for source_offset, target_offset, length in pieces:
        expected[target_offset : target_offset + length] = source.array[source_offset : source_offset + length]
    assert np.array_equal(peer.memory.array, expected)
    assert (report.num_bytes, report.num_runs) == (sum(n for *_, n in pieces), len(pieces))
    assert report.posted_at_s <= report.landed_at_s


def test_twenty_thousand_scattered_runs_all_land(link: PeerLink, source: Memory, peer: Peer) -> None:
    runs, targets = scattered(source, peer, NUM_SCATTERED, 4 * KIB)
    report = link.write(runs, timeout_s=60).result(60)
    assert report.num_runs == NUM_SCATTERED
    rows = peer.memory.array[: NUM_SCATTERED * 4 * KIB].reshape(NUM_SCATTERED, -1)
    assert np.array_equal(rows[targets], source.array[: NUM_SCATTERED * 4 * KIB].reshape(NUM_SCATTERED, -1))


def test_coalesced_runs_land_like_the_ones_they_replace(link: PeerLink, source: Memory, peer: Peer) -> None:
    order = np.random.default_rng(5).permutation(NUM_SCATTERED)
    runs = coalesce([run(source, int(i) * 4 * KIB, peer, int(i) * 4 * KIB, 4 * KIB) for i in order])
    report = link.write(runs, timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert report.num_runs == -(-NUM_SCATTERED * 4 * KIB // (8 << 20))
    assert report.num_bytes == NUM_SCATTERED * 4 * KIB
    assert np.array_equal(peer.memory.array[: report.num_bytes], source.array[: report.num_bytes])


def test_a_nonce_lands_in_memory_outside_the_arena(link: PeerLink, source: Memory, peer: Peer) -> None:
    nonce = Run(source.region.base_address + 123, peer.probe_region.base_address, 32)
    link.write([nonce], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert peer.probe.array[:32].tobytes() == source.array[123:155].tobytes()
    assert not peer.memory.array.any()


def test_no_runs_is_a_write_of_nothing(link: PeerLink) -> None:
    report = link.write([], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert (report.num_bytes, report.num_runs) == (0, 0)


def test_many_writes_in_flight_each_get_their_own_report(link: PeerLink, source: Memory, peer: Peer) -> None:
    futures = [link.write([run(source, i * KIB, peer, i * KIB, KIB)], timeout_s=PATIENCE_S) for i in range(300)]
    assert [future.result(PATIENCE_S).num_bytes for future in futures] == [KIB] * 300
    assert np.array_equal(peer.memory.array[: 300 * KIB], source.array[: 300 * KIB])


def test_writes_from_several_threads_do_not_disturb_one_another(link: PeerLink, source: Memory, peer: Peer) -> None:
    def work(worker: int) -> None:
        for i in range(worker * 50, worker * 50 + 50):
            link.write([run(source, i * KIB, peer, i * KIB, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(peer.memory.array[: 200 * KIB], source.array[: 200 * KIB])


def test_a_posted_write_cannot_be_cancelled_and_ends_on_a_thread_of_the_engine(
    link: PeerLink, source: Memory, peer: Peer
) -> None:
    enders: list[int] = []
    future = link.write(scattered(source, peer, 2000, 4 * KIB)[0], timeout_s=PATIENCE_S)
    future.add_done_callback(lambda _: enders.append(threading.get_ident()))
    assert not future.cancel()
    assert future.result(PATIENCE_S).num_runs == 2000
    link.write([], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert enders
    assert enders[0] != threading.get_ident()


@pytest.mark.parametrize(
    ("target_offset", "length_bytes"),
    [(-4096, 4096), (-1, 2), ((80 << 20) - 1, 2), (80 << 20, 32), (1 << 40, 4096)],
    ids=["before", "into", "out of", "registered but not opened", "far away"],
)
def test_a_target_outside_the_opened_regions_is_rejected_before_anything_is_sent(
    engine: TransferEngine, source: Memory, peer: Peer, target_offset: int, length_bytes: int
) -> None:
    link = engine.open_peer(peer.endpoint, [peer.region])
    good, bad = run(source, 0, peer, 0, 4096), run(source, 0, peer, target_offset, length_bytes)
    with pytest.raises(TransferRejected, match=r"run 1: target .* is outside the regions"):
        link.write([good, bad], timeout_s=PATIENCE_S).result(PATIENCE_S)
    link.write([], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert not peer.memory.array.any()
    assert not peer.probe.array.any()


def test_a_rejected_write_leaves_the_link_usable(link: PeerLink, source: Memory, peer: Peer) -> None:
    with pytest.raises(TransferRejected):
        link.write([run(source, 0, peer, 1 << 40, 1)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    link.write([run(source, 0, peer, 0, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert np.array_equal(peer.memory.array[:KIB], source.array[:KIB])


def test_a_source_outside_the_registered_memory_is_rejected(link: PeerLink, source: Memory, peer: Peer) -> None:
    with pytest.raises(TransferRejected, match=r"run 0: source .* is outside this engine's registered memory"):
        link.write([run(source, source.array.size - 1, peer, 0, 2)], timeout_s=PATIENCE_S).result(PATIENCE_S)


@pytest.mark.parametrize("bad", [Run(-1, 4096, 1), Run(4096, 0, 1), Run(4096, 4096, 0), Run(4096, 4096, -5)])
def test_malformed_runs_are_rejected(link: PeerLink, bad: Run) -> None:
    with pytest.raises(TransferRejected, match="malformed"):
        link.write([bad], timeout_s=PATIENCE_S).result(PATIENCE_S)


def test_addresses_that_would_wrap_are_rejected(link: PeerLink, peer: Peer, source: Memory) -> None:
    for bad in (1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64):
        with pytest.raises(TransferRejected):
            link.write([Run(source.region.base_address, bad, 1)], timeout_s=PATIENCE_S).result(PATIENCE_S)
        runs = [Run(source.region.base_address, peer.region.base_address, bad)]
        with pytest.raises(TransferRejected):
            link.write(runs, timeout_s=PATIENCE_S).result(PATIENCE_S)


def test_two_runs_to_the_same_bytes_are_rejected(link: PeerLink, source: Memory, peer: Peer) -> None:
    runs = [run(source, 0, peer, 4096, 100), run(source, 500, peer, 0, 64), run(source, 300, peer, 4195, 10)]
    with pytest.raises(TransferRejected, match="runs 0 and 2 write the same target bytes"):
        link.write(runs, timeout_s=PATIENCE_S).result(PATIENCE_S)


def test_registering_overlapping_or_empty_memory_is_refused(engine: TransferEngine, source: Memory) -> None:
    with pytest.raises(ValueError, match="overlaps"):
        engine.register(source.region.base_address + 4096, 4096)
    with pytest.raises(ValueError, match="must be positive"):
        engine.register(4096, 0)


def test_opening_a_region_that_the_peer_does_not_expose_is_rejected(engine: TransferEngine, peer: Peer) -> None:
    beyond = Region(base_address=peer.region.base_address + 4096, num_bytes=peer.region.num_bytes + 4096)
    with pytest.raises(TransferRejected, match="does not expose"):
        engine.open_peer(peer.endpoint, [beyond])


def test_opening_without_regions_or_with_overlapping_ones_is_refused(engine: TransferEngine, peer: Peer) -> None:
    with pytest.raises(ValueError, match="at least one region"):
        engine.open_peer(peer.endpoint, [])
    with pytest.raises(ValueError, match="overlaps"):
        engine.open_peer(peer.endpoint, [peer.region, peer.region])


def test_opening_an_endpoint_where_nobody_is_fails_and_names_it(plane: Plane, engine: TransferEngine) -> None:
    endpoint = plane.unused_endpoint()
    with pytest.raises(PeerUnreachable, match=endpoint) as caught:
        engine.open_peer(endpoint, [Region(base_address=4096, num_bytes=4096)])
    assert caught.value.peer == endpoint


def test_opening_a_peer_that_is_gone_fails(engine: TransferEngine, doomed_peer: Peer) -> None:
    doomed_peer.kill()
    with pytest.raises(PeerUnreachable, match=doomed_peer.endpoint):
        engine.open_peer(doomed_peer.endpoint, [doomed_peer.region])


def test_a_peer_that_dies_under_a_write_fails_it_and_harms_no_other(
    engine: TransferEngine, link: PeerLink, source: Memory, peer: Peer, doomed_peer: Peer
) -> None:
    doomed_link = engine.open_peer(doomed_peer.endpoint, [doomed_peer.region])
    doomed_peer.freeze()
    doomed = doomed_link.write([run(source, 0, doomed_peer, 0, 8 << 20)], timeout_s=PATIENCE_S)
    link.write([run(source, 0, peer, 0, 1 << 20)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert not doomed.done()
    doomed_peer.kill()
    with pytest.raises(TransferError, match=doomed_peer.endpoint) as caught:
        doomed.result(PATIENCE_S)
    assert caught.value.peer == doomed_peer.endpoint
    link.write([run(source, 0, peer, 2 << 20, 1 << 20)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert np.array_equal(peer.memory.array[: 1 << 20], source.array[: 1 << 20])
    assert np.array_equal(peer.memory.array[2 << 20 : 3 << 20], source.array[: 1 << 20])


def test_a_failed_link_stays_failed_with_its_reason(engine: TransferEngine, source: Memory, doomed_peer: Peer) -> None:
    link = engine.open_peer(doomed_peer.endpoint, [doomed_peer.region])
    doomed_peer.kill()
    with pytest.raises(TransferError) as first:
        link.write([run(source, 0, doomed_peer, 0, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    later = link.write([run(source, 0, doomed_peer, 0, KIB)], timeout_s=PATIENCE_S)
    assert later.done()
    assert type(later.exception()) is type(first.value)
    assert first.value.reason in str(later.exception())


def test_a_peer_that_stops_under_a_write_ends_it_with_an_error(
    engine: TransferEngine, source: Memory, doomed_peer: Peer
) -> None:
    link = engine.open_peer(doomed_peer.endpoint, [doomed_peer.region])
    doomed_peer.freeze()
    with pytest.raises(TransferError, match=doomed_peer.endpoint):
        link.write([run(source, 0, doomed_peer, 0, 8 << 20)], timeout_s=1.0).result(PATIENCE_S)


def test_a_write_without_time_posts_nothing_and_leaves_the_link_usable(
    link: PeerLink, source: Memory, peer: Peer
) -> None:
    with pytest.raises(TransferTimeout):
        link.write([run(source, 0, peer, 0, KIB)], timeout_s=0.0).result(PATIENCE_S)
    assert not peer.memory.array.any()
    link.write([run(source, 0, peer, 0, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert peer.memory.array[:KIB].all()


def test_a_closed_link_refuses_writes_and_others_go_on(
    engine: TransferEngine, link: PeerLink, source: Memory, peer: Peer
) -> None:
    other = engine.open_peer(peer.endpoint, [peer.region])
    link.close()
    link.close()
    with pytest.raises(EngineClosed, match="link is closed"):
        link.write([run(source, 0, peer, 0, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    other.write([run(source, 0, peer, 0, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert peer.memory.array[:KIB].all()


def test_a_closed_engine_refuses_everything(engine: TransferEngine, link: PeerLink, source: Memory, peer: Peer) -> None:
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed):
        link.write([run(source, 0, peer, 0, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    with pytest.raises(EngineClosed):
        engine.open_peer(peer.endpoint, [peer.region])
    with pytest.raises(EngineClosed):
        engine.register(1 << 40, 4096)


def test_closing_the_engine_ends_writes_under_way(engine: TransferEngine, source: Memory, doomed_peer: Peer) -> None:
    link = engine.open_peer(doomed_peer.endpoint, [doomed_peer.region])
    doomed_peer.freeze()
    future = link.write([run(source, 0, doomed_peer, 0, 8 << 20)], timeout_s=PATIENCE_S)
    engine.close()
    with pytest.raises(TransferError):
        future.result(PATIENCE_S)


def test_a_closed_engine_receives_nothing_any_more(make_engine: Callable[[], TransferEngine], source: Memory) -> None:
    receiver, writer = make_engine(), make_engine()
    target = Memory(1 << 20)
    target.register_with(receiver)
    receiver.allow(NO_KEY, spans_of(target.region))
    link = writer.open_peer(receiver.endpoint, [target.region])
    receiver.close()
    future = link.write([Run(source.region.base_address, target.region.base_address, KIB)], timeout_s=PATIENCE_S)
    with pytest.raises(TransferError):
        future.result(PATIENCE_S)
    assert not target.array.any()


def test_a_forked_child_is_refused_and_the_parent_goes_on(
    engine: TransferEngine, link: PeerLink, source: Memory, peer: Peer
) -> None:
    child = os.fork()
    if child == 0:
        os._exit(_refusals_in_child(engine, link, source, peer))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    link.write([run(source, 0, peer, 0, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert peer.memory.array[:KIB].all()


def _refusals_in_child(engine: TransferEngine, link: PeerLink, source: Memory, peer: Peer) -> int:
    num_refused = 0
    for call in (
        lambda: link.write([run(source, 0, peer, 0, KIB)], timeout_s=PATIENCE_S).result(0),
        lambda: engine.open_peer(peer.endpoint, [peer.region]),
        lambda: engine.register(1 << 40, 4096),
    ):
        try:
            call()
        except EngineClosed:
            num_refused += 1
        except BaseException:
            return 100
    link.close()
    engine.close()
    return num_refused


def test_an_idle_engine_uses_no_cpu(engine: TransferEngine, link: PeerLink, source: Memory, peer: Peer) -> None:
    link.write([run(source, 0, peer, 0, KIB)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    before_s = time.process_time()
    # Waits on something that never comes: a spinning thread would use all of this time, a polling one a tenth.
    threading.Event().wait(0.3)
    assert time.process_time() - before_s < 0.02
