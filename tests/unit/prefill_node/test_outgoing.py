"""The writes of one handoff: counted, fenced, and always brought to an end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from cache_runtime.transfer.engine import (
    EngineClosed,
    LinkWedged,
    Run,
    Spans,
    TransferFailed,
    TransferReport,
    TransferRevoked,
)
from node_runtime.clock import ManualClock
from prefill_node.outgoing import OutgoingTransfer, TransferDrained, TransferFault, TransferLanded, TransferNews

RUN = Run(1, 2, 3)
LEASE_END_S = 3.6


class HeldLink:
    """A peer link whose writes end when the test says so."""

    peer = "decode:1"

    def __init__(self) -> None:
        self.writes: list[Future[TransferReport]] = []
        self.wanted: list[Callable[[], bool]] = []
        self.refusal: Exception | None = None

    def write(
        self, runs, *, key: bytes, timeout_s: float, is_wanted: Callable[[], bool], hashed: Spans, digest_kind: str
    ) -> Future[TransferReport]:
        if self.refusal is not None:
            raise self.refusal
        self.wanted.append(is_wanted)
        self.writes.append(Future())
        return self.writes[-1]

    def close(self) -> None:
        pass

    def land(self, index: int, posted_at_s: float = 1.0, landed_at_s: float = 2.0) -> None:
        report = TransferReport(num_bytes=100, num_runs=2, posted_at_s=posted_at_s, landed_at_s=landed_at_s)
        self.writes[index].set_result(report)


@pytest.fixture
def link() -> HeldLink:
    return HeldLink()


@pytest.fixture
def news() -> list[TransferNews]:
    return []


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def transfer(link: HeldLink, news: list[TransferNews], clock: ManualClock) -> OutgoingTransfer:
    return OutgoingTransfer(
        link, news.append, key=b"k" * 16, now_s=clock.now_s, write_timeout_s=1.0, post_until_s=LEASE_END_S
    )


def test_it_has_landed_when_all_was_posted_and_the_last_write_landed(transfer, link, news) -> None:
    transfer.post([RUN])
    transfer.post([RUN])
    link.land(1, posted_at_s=5.0, landed_at_s=9.0)
    transfer.complete()
    assert news == []
    link.land(0, posted_at_s=4.0, landed_at_s=8.0)
    (landed,) = news
    assert isinstance(landed, TransferLanded)
    assert (landed.summary.num_bytes, landed.summary.num_runs) == (200, 4)
    assert landed.summary.busy == ((4.0, 9.0),)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_transfer_is_busy_only_while_a_write_is_outstanding_in_whatever_order_they_land(
    transfer, link, news, order
) -> None:
    writes = ((1.0, 2.0), (1.5, 3.0), (3.0, 3.25), (5.0, 6.0))
    for _ in writes:
        transfer.post([RUN])
    for index in order:
        link.land(index, *writes[index])
    transfer.complete()
    (landed,) = news
    assert landed.summary.busy == ((1.0, 3.25), (5.0, 6.0))
    assert landed.summary.busy_s() == 3.25
    assert landed.summary.busy_s(since_s=2.25) == 2.0
    assert landed.summary.busy_s(since_s=7.0) == 0.0


def test_a_transfer_without_a_write_was_never_busy(transfer, news) -> None:
    transfer.complete()
    (landed,) = news
    assert landed.summary.busy == ()
    assert landed.summary.busy_s() == 0.0


def test_landing_before_the_last_post_is_not_the_end(transfer, link, news) -> None:
    transfer.post([RUN])
    link.land(0)
    assert news == []
    transfer.complete()
    assert isinstance(news[0], TransferLanded)


def test_after_stop_nothing_is_posted_and_it_drains_with_the_last_write(transfer, link, news) -> None:
    transfer.post([RUN])
    transfer.stop()
    transfer.post([RUN])
    assert len(link.writes) == 1
    assert news == []
    link.land(0)
    assert news == [TransferDrained()]


def test_stopping_with_nothing_outstanding_drains_at_once_and_only_once(transfer, news) -> None:
    transfer.stop()
    transfer.stop()
    transfer.complete()
    assert news == [TransferDrained()]


def test_a_failed_write_is_told_once_and_stops_the_posting(transfer, link, news) -> None:
    transfer.post([RUN])
    transfer.post([RUN])
    error = TransferFailed("decode:1", "connection reset")
    link.writes[0].set_exception(error)
    link.writes[1].set_exception(TransferFailed("decode:1", "the same again"))
    transfer.post([RUN])
    transfer.complete()
    assert news == [TransferFault(error=error)]
    assert len(link.writes) == 2
    transfer.stop()
    assert news[1:] == [TransferDrained()]


def test_a_write_that_is_refused_outright_is_a_fault(transfer, link, news) -> None:
    link.refusal = EngineClosed("decode:1", "the link is closed")
    transfer.post([RUN])
    assert news == [TransferFault(error=link.refusal)]
    transfer.stop()
    assert news[1:] == [TransferDrained()]


def test_a_fault_of_our_own_is_told_once(transfer, news) -> None:
    error = ValueError("no such block")
    transfer.fail(error)
    transfer.fail(error)
    assert news == [TransferFault(error=error)]


def test_a_failure_after_stop_is_only_the_end_of_a_write(transfer, link, news) -> None:
    transfer.post([RUN])
    transfer.stop()
    link.writes[0].set_exception(TransferFailed("decode:1", "gone"))
    assert news == [TransferDrained()]


def test_a_fault_that_is_found_after_the_end_is_not_told(transfer, news) -> None:
    transfer.stop()
    transfer.fail(ValueError("no such block"))
    assert news == [TransferDrained()]


def test_what_has_landed_is_told_once(transfer, link, news) -> None:
    transfer.post([RUN])
    link.land(0)
    transfer.complete()
    transfer.complete()
    assert [type(item) for item in news] == [TransferLanded]


@pytest.mark.parametrize("last", ["it lands", "it fails"])
def test_a_wedged_write_never_counts_as_drained_however_the_others_end(
    transfer, link, news, caplog: pytest.LogCaptureFixture, last: str
) -> None:
    transfer.post([RUN])
    transfer.post([RUN])
    link.writes[0].set_exception(LinkWedged("decode:1", "runs never ended"))
    assert "runs never ended; the blocks of this handoff stay out of use" in caplog.text
    transfer.stop()
    if last == "it lands":
        link.land(1)
    else:
        link.writes[1].set_exception(TransferFailed("decode:1", "connection reset"))
    assert [type(item) for item in news] == [TransferFault]
    assert caplog.text.count("stay out of use") == 1


def test_a_write_that_is_posted_while_another_one_fails_is_still_waited_for(transfer, link, news) -> None:
    transfer.post([RUN])
    lock = transfer._lock

    class FailsTheFirstWriteOnRelease:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            transfer._lock = lock
            lock.release()
            link.writes[0].set_exception(TransferFailed("decode:1", "connection reset"))

    transfer._lock = FailsTheFirstWriteOnRelease()
    transfer.post([RUN])
    transfer.stop()
    assert [type(item) for item in news] == [TransferFault]
    link.land(1)
    assert news[1:] == [TransferDrained()]


@pytest.mark.parametrize("end", ["stop", "fail"])
def test_what_waits_inside_the_data_plane_is_not_wanted_any_more_after_the_end(transfer, link, end: str) -> None:
    transfer.post([RUN])
    assert link.wanted[0]()
    if end == "stop":
        transfer.stop()
    else:
        transfer.fail(ValueError("no such block"))
    assert not link.wanted[0]()


def test_from_the_end_of_its_lease_on_nothing_is_posted_and_what_waits_for_room_is_dropped(
    transfer, link, news, clock
) -> None:
    transfer.post([RUN])
    assert link.wanted[0]()
    clock.advance(LEASE_END_S)
    assert not link.wanted[0]()
    transfer.post([RUN])
    assert len(link.writes) == 1
    (fault,) = news
    assert isinstance(fault, TransferFault)
    assert isinstance(fault.error, TransferRevoked)
    transfer.complete()
    link.land(0)
    assert len(news) == 1


def test_a_renewed_lease_lets_writes_be_posted_further(transfer, link, news, clock) -> None:
    transfer.extend(LEASE_END_S + 1.0)
    clock.advance(LEASE_END_S)
    transfer.post([RUN])
    assert link.wanted[0]()
    link.land(0)
    transfer.complete()
    assert isinstance(news[-1], TransferLanded)
