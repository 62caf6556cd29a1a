"""The windowed sender with a scripted native side and a clock that only the test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from cache_runtime.transfer.engine import (
    EngineClosed,
    LinkCrowded,
    LinkWedged,
    Run,
    TransferFailed,
    TransferReport,
    TransferRevoked,
    TransferTimeout,
    always_wanted,
)
from cache_runtime.transfer.poller import (
    MAX_IN_FLIGHT_BYTES,
    MAX_IN_FLIGHT_RUNS,
    Poller,
    PostedWrite,
    SendingLink,
)

DRAIN_S = 8.0


class ScriptedSender:
    """Hands out tickets; `land` and `fail` decide what `check` says about them."""

    def __init__(self) -> None:
        self.submitted: list[Run] = []
        self.statuses: dict[int, int] = {}
        self.num_refused = 0
        self.refuse_from: int | None = None

    @property
    def num_under_way(self) -> int:
        return sum(status == 0 for status in self.statuses.values())

    def submit(self, run: Run) -> int:
        if self.refuse_from is not None and len(self.submitted) >= self.refuse_from:
            self.num_refused += 1
            return 0
        self.submitted.append(run)
        self.statuses[len(self.submitted)] = 0
        return len(self.submitted)

    def check(self, ticket: int) -> int:
        status = self.statuses[ticket]
        if status:
            # The native side crashes when asked again.
            del self.statuses[ticket]
        return status

    def land(self, count: int | None = None) -> None:
        for ticket in list(self.statuses)[:count]:
            self.statuses[ticket] = 1

    def fail(self, *tickets: int) -> None:
        for ticket in tickets:
            self.statuses[ticket] = -1


class LinkUnderTest(SendingLink):
    def __init__(self) -> None:
        self.sender = ScriptedSender()
        super().__init__("peer:1", self.sender, DRAIN_S)

    def post(
        self,
        runs: Sequence[Run],
        *,
        timeout_s: float = 100.0,
        now_s: float = 0.0,
        is_wanted: Callable[[], bool] = always_wanted,
    ) -> PostedWrite:
        write = PostedWrite(runs=runs, timeout_s=timeout_s, posted_at_s=now_s, is_wanted=is_wanted)
        write.future.set_running_or_notify_cancel()
        self.accept(write)
        return write


@pytest.fixture
def link() -> LinkUnderTest:
    return LinkUnderTest()


def runs(count: int, length_bytes: int = 10) -> list[Run]:
    return [Run(1 + i * length_bytes, 1 + i * length_bytes, length_bytes) for i in range(count)]


def error_of(write: PostedWrite) -> BaseException | None:
    return write.future.exception(timeout=0)


def test_a_write_ends_only_when_its_last_run_has_landed(link: LinkUnderTest) -> None:
    write = link.post(runs(3))
    assert link.step(1.0)
    link.sender.land(2)
    assert link.step(2.0)
    assert not write.future.done()
    assert not link.step(2.5)
    link.sender.land()
    link.step(3.0)
    assert write.future.result(0) == TransferReport(num_bytes=30, num_runs=3, posted_at_s=0.0, landed_at_s=3.0)
    assert link.is_idle


def test_runs_in_flight_are_bounded_in_number(link: LinkUnderTest) -> None:
    write = link.post(runs(2 * MAX_IN_FLIGHT_RUNS + 1))
    link.step(0.0)
    assert link.sender.num_under_way == MAX_IN_FLIGHT_RUNS
    link.sender.land(5)
    link.step(0.0)
    assert link.sender.num_under_way == MAX_IN_FLIGHT_RUNS
    assert len(link.sender.submitted) == MAX_IN_FLIGHT_RUNS + 5
    while not write.future.done():
        link.sender.land()
        link.step(0.0)
    assert link.sender.submitted == list(write.runs)


def test_runs_in_flight_are_bounded_in_bytes(link: LinkUnderTest) -> None:
    link.post(runs(10, MAX_IN_FLIGHT_BYTES // 4))
    link.step(0.0)
    assert link.sender.num_under_way == 4


def test_a_run_larger_than_the_window_goes_alone(link: LinkUnderTest) -> None:
    write = link.post(runs(2, 2 * MAX_IN_FLIGHT_BYTES))
    link.step(0.0)
    assert link.sender.num_under_way == 1
    link.sender.land()
    link.step(0.0)
    link.sender.land()
    link.step(0.0)
    assert write.future.result(0).num_runs == 2


def test_a_later_write_uses_the_room_an_earlier_one_leaves(link: LinkUnderTest) -> None:
    first, second = link.post(runs(3)), link.post(runs(2))
    link.step(0.0)
    assert link.sender.num_under_way == 5
    link.sender.fail()
    for ticket in (4, 5):
        link.sender.statuses[ticket] = 1
    link.step(0.0)
    assert second.future.done()
    assert not first.future.done()


def test_tickets_that_end_out_of_order_are_all_found(link: LinkUnderTest) -> None:
    write = link.post(runs(100))
    link.step(0.0)
    for ticket in range(100, 0, -1):
        link.sender.statuses[ticket] = 1
        link.step(0.0)
    link.step(0.0)
    assert write.future.result(0).num_runs == 100


def test_a_failed_run_stops_posting_and_waits_for_the_others(link: LinkUnderTest) -> None:
    write = link.post(runs(MAX_IN_FLIGHT_RUNS + 50))
    link.step(0.0)
    link.sender.fail(1)
    link.step(1.0)
    link.sender.land(3)
    link.step(2.0)
    assert len(link.sender.submitted) == MAX_IN_FLIGHT_RUNS, "nothing is posted after a failure"
    assert not write.future.done(), "runs are still outstanding"
    link.sender.land()
    link.step(3.0)
    assert isinstance(error_of(write), TransferFailed)
    assert "peer:1: the data plane reported status -1" in str(error_of(write))


def test_a_failure_ends_the_writes_queued_behind_it_with_its_reason(link: LinkUnderTest) -> None:
    first, second = link.post(runs(MAX_IN_FLIGHT_RUNS)), link.post(runs(3))
    link.step(0.0)
    link.sender.fail(2)
    link.sender.land(1)
    link.step(1.0)
    assert isinstance(error_of(second), TransferFailed)
    assert "status -1" in str(error_of(second))
    assert not first.future.done()
    assert link.failure is not None


def test_a_write_that_was_all_posted_may_still_land_after_another_failed(link: LinkUnderTest) -> None:
    first, second = link.post(runs(1)), link.post(runs(1))
    link.step(0.0)
    link.sender.fail(1)
    link.sender.statuses[2] = 1
    link.step(1.0)
    assert isinstance(error_of(first), TransferFailed)
    assert second.future.result(0).num_runs == 1


def test_a_refused_run_fails_the_write(link: LinkUnderTest) -> None:
    link.sender.refuse_from = 2
    write = link.post(runs(5))
    link.step(0.0)
    link.sender.land()
    link.step(0.0)
    assert "refused run 2" in str(error_of(write))
    assert link.sender.num_refused == 1


def test_a_write_that_runs_out_of_time_stops_posting_and_ends_once_quiet(link: LinkUnderTest) -> None:
    write = link.post(runs(MAX_IN_FLIGHT_RUNS + 50), timeout_s=5.0)
    link.step(1.0)
    link.step(6.0)
    assert not write.future.done()
    link.sender.land()
    for _ in range(40):
        link.step(7.0)
    error = error_of(write)
    assert isinstance(error, TransferTimeout)
    assert not isinstance(error, LinkCrowded)
    assert len(link.sender.submitted) == MAX_IN_FLIGHT_RUNS
    assert link.failure is None, "running out of time says nothing about the peer"


def test_a_write_that_gets_on_is_not_out_of_time_however_long_it_takes(link: LinkUnderTest) -> None:
    write = link.post(runs(MAX_IN_FLIGHT_RUNS + 60), timeout_s=5.0)
    for step in range(8):
        link.step(4.0 * step)
        link.sender.land(10)
    link.sender.land()
    link.step(32.0)
    link.sender.land()
    link.step(33.0)
    assert write.future.result(0).num_runs == MAX_IN_FLIGHT_RUNS + 60


def test_a_write_whose_turn_does_not_come_ends_in_time_and_the_one_ahead_is_not_hurried(link: LinkUnderTest) -> None:
    ahead = link.post(runs(MAX_IN_FLIGHT_RUNS + 20), timeout_s=5.0)
    behind = link.post(runs(3), timeout_s=5.0)
    link.step(0.0)
    link.sender.land(10)
    link.step(4.9)
    assert not behind.future.done()
    link.step(5.0)
    assert isinstance(error_of(behind), LinkCrowded)
    assert "other writes were ahead for 5.0 s" in str(error_of(behind))
    assert link.failure is None
    for now_s in (6.0, 7.0, 8.0):
        link.sender.land()
        link.step(now_s)
    assert ahead.future.result(0).num_runs == MAX_IN_FLIGHT_RUNS + 20


def test_a_write_that_is_not_wanted_any_more_stops_posting_and_harms_no_other(link: LinkUnderTest) -> None:
    is_wanted = True
    write = link.post(runs(MAX_IN_FLIGHT_RUNS + 50), is_wanted=lambda: is_wanted)
    other = link.post(runs(3))
    link.step(1.0)
    is_wanted = False
    link.sender.land(10)
    link.step(2.0)
    assert not write.future.done(), "posted runs are still under way"
    assert write.num_posted == MAX_IN_FLIGHT_RUNS
    for now_s in (3.0, 4.0, 5.0):
        link.sender.land()
        link.step(now_s)
    assert isinstance(error_of(write), TransferRevoked)
    assert write.num_posted == MAX_IN_FLIGHT_RUNS
    assert other.future.result(0).num_runs == 3
    assert link.failure is None


def test_a_write_that_was_posted_wholly_is_a_success_whether_it_is_wanted_or_not(link: LinkUnderTest) -> None:
    is_wanted = True
    write = link.post(runs(2), is_wanted=lambda: is_wanted)
    link.step(1.0)
    is_wanted = False
    link.step(2.0)
    link.sender.land()
    link.step(3.0)
    assert write.future.result(0).num_runs == 2


def test_a_write_that_lands_late_but_wholly_is_a_success(link: LinkUnderTest) -> None:
    write = link.post(runs(2), timeout_s=5.0)
    link.step(1.0)
    link.step(6.0)
    link.sender.land()
    link.step(7.0)
    assert write.future.result(0).landed_at_s == 7.0


@pytest.mark.parametrize("num_runs", [2, MAX_IN_FLIGHT_RUNS + 2], ids=["all posted", "not all posted"])
def test_runs_that_never_end_wedge_the_link_after_the_drain_bound(link: LinkUnderTest, num_runs: int) -> None:
    write = link.post(runs(num_runs), timeout_s=5.0)
    link.step(0.0)
    link.step(5.0)
    link.step(5.0 + DRAIN_S)
    assert not write.future.done()
    link.step(5.1 + DRAIN_S)
    assert isinstance(error_of(write), LinkWedged)
    assert isinstance(link.failure, LinkWedged)
    assert link.is_idle


def test_a_wedge_after_a_failure_is_reported_as_a_wedge(link: LinkUnderTest) -> None:
    write = link.post(runs(2))
    link.step(0.0)
    link.sender.fail(1)
    link.step(1.0)
    link.step(1.1 + DRAIN_S)
    assert isinstance(error_of(write), LinkWedged), "bytes may still land, so a plain failure would be a lie"


def test_a_wedged_write_leaves_the_others_their_own_time(link: LinkUnderTest) -> None:
    short, long = link.post(runs(1), timeout_s=1.0), link.post(runs(1), timeout_s=100.0)
    link.step(0.0)
    link.step(1.0)
    link.step(1.1 + DRAIN_S)
    assert isinstance(error_of(short), LinkWedged)
    link.sender.statuses[2] = 1
    link.step(20.0)
    assert long.future.result(0).num_runs == 1


def test_a_retired_link_posts_nothing_more_and_ends_what_it_has(link: LinkUnderTest) -> None:
    write = link.post(runs(MAX_IN_FLIGHT_RUNS + 1))
    link.step(0.0)
    link.retire(EngineClosed("peer:1", "the link is closed"))
    link.sender.land(4)
    link.step(1.0)
    assert not write.future.done()
    for _ in range(2):
        link.sender.land()
        link.step(2.0)
    assert isinstance(error_of(write), EngineClosed)
    assert len(link.sender.submitted) == MAX_IN_FLIGHT_RUNS


def test_the_first_reason_of_a_retired_link_is_kept(link: LinkUnderTest) -> None:
    link.retire(TransferFailed("peer:1", "first"))
    link.retire(EngineClosed("peer:1", "second"))
    refusal = link.refusal()
    assert isinstance(refusal, TransferFailed)
    assert refusal.reason == "first"


def test_a_defect_in_the_native_side_ends_every_write_instead_of_hanging_it() -> None:
    class BrokenSender(ScriptedSender):
        def check(self, ticket: int) -> int:
            raise RuntimeError("defect")

    poller = Poller("test-poller", lambda: 0.0)
    links = [SendingLink(f"peer:{i}", BrokenSender(), DRAIN_S) for i in range(2)]
    writes = [PostedWrite(runs=runs(1), timeout_s=9.0, posted_at_s=0.0) for _ in links]
    for link, write in zip(links, writes, strict=True):
        write.future.set_running_or_notify_cancel()
        try:
            poller.post(link, write)
        except EngineClosed:
            continue
        assert isinstance(write.future.exception(timeout=30), LinkWedged)
    with pytest.raises(EngineClosed):
        poller.post(links[0], writes[0])


def test_a_poller_that_waits_for_nothing_never_looks_at_the_clock() -> None:
    looked = threading.Event()

    def clock() -> float:
        looked.set()
        return 0.0

    sender = ScriptedSender()
    poller, link = Poller("test-poller", clock), SendingLink("peer:1", sender, DRAIN_S)
    assert not looked.is_set()
    write = PostedWrite(runs=[], timeout_s=9.0, posted_at_s=0.0)
    write.future.set_running_or_notify_cancel()
    poller.post(link, write)
    assert write.future.result(30).num_runs == 0
    assert looked.is_set()
    poller.close()
    with pytest.raises(EngineClosed):
        poller.post(link, write)
