"""Posts runs through a bounded window and polls each to its end: one thread for all links of an engine.

Knows a native sender only as "submit one run, ask how it is going". Sleeps between polls, adaptively, because waiting
inside the native library spins a core; blocks without a timeout when nothing is in flight, so an idle node uses no CPU.
Owned by the engine. State of a link is touched by the poller's thread only; callers hand writes over through an inbox.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .engine import (
    EngineClosed,
    LinkCrowded,
    LinkWedged,
    Run,
    TransferError,
    TransferFailed,
    TransferReport,
    TransferRevoked,
    TransferTimeout,
    always_wanted,
)

_LOG = logging.getLogger(__name__)

# Beyond about 2,000 slices to one peer the native queue overflows, and may stay broken for good.
MAX_IN_FLIGHT_RUNS = 512
MAX_IN_FLIGHT_BYTES = 128 << 20
MIN_SLEEP_S = 50e-6
MAX_SLEEP_S = 1e-3
_SLEEP_GROWTH = 1.5
# Runs of a peer end nearly in the order they were posted, so a few that are still under way tell that the rest are too.
_POLL_AHEAD = 16


class RunSender(Protocol):
    """One peer's native sending side. Neither call may block for long."""

    def submit(self, run: Run) -> int:
        """Posts a run; returns a ticket, or 0 when the run was refused."""
        ...

    def check(self, ticket: int) -> int:
        """1 landed, 0 under way, negative failed. A ticket that ended must not be asked about again."""
        ...


@dataclass(slots=True, eq=False)
class PostedWrite:
    """One `write` call on its way."""

    runs: Sequence[Run]
    timeout_s: float
    posted_at_s: float
    is_wanted: Callable[[], bool] = always_wanted
    future: Future[TransferReport] = field(default_factory=Future)
    num_posted: int = 0
    num_outstanding: int = 0
    num_landed: int = 0
    landed_bytes: int = 0
    error: TransferError | None = None
    last_post_at_s: float | None = None
    # When posting ended before all runs were out; the drain bound runs from here.
    stopped_at_s: float | None = None

    @property
    def deadline_s(self) -> float:
        """Until when one more run must be posted, and after the last one the write have ended."""
        return (self.posted_at_s if self.last_post_at_s is None else self.last_post_at_s) + self.timeout_s

    @property
    def wants_to_post(self) -> bool:
        return self.error is None and self.num_posted < len(self.runs)

    @property
    def is_over(self) -> bool:
        return self.num_outstanding == 0 and not self.wants_to_post

    def progress(self) -> str:
        return f"{self.num_landed} of {len(self.runs)} runs landed"

    def stop(self, error: TransferError, now_s: float) -> None:
        """Posts nothing more; the first reason is kept."""
        if self.error is None:
            self.error = error
            self.stopped_at_s = now_s


class _Slice(NamedTuple):
    ticket: int
    num_bytes: int
    write: PostedWrite


class SendingLink:
    """The poller's view of one peer: writes in the order they came, and what is in flight."""

    def __init__(self, peer: str, sender: RunSender, drain_bound_s: float) -> None:
        self.peer = peer
        # Why the link takes no more writes. Set once, read by any thread.
        self.failure: TransferError | None = None
        self._sender = sender
        self._drain_bound_s = drain_bound_s
        self._writes: deque[PostedWrite] = deque()
        self._in_flight: deque[_Slice] = deque()
        self._in_flight_bytes = 0

    @property
    def is_idle(self) -> bool:
        return not self._writes

    def retire(self, error: TransferError) -> None:
        """Takes no more writes, and posts nothing more of those it has. The first reason is kept."""
        if self.failure is None:
            self.failure = error

    def refusal(self) -> TransferError | None:
        """The reason of the failure."""
        return None if self.failure is None else self.failure.again()

    def accept(self, write: PostedWrite) -> None:
        self._writes.append(write)

    def step(self, now_s: float) -> bool:
        """One round of settling, stopping, posting and completing; returns whether anything moved."""
        num_ended = self._settle(now_s)
        self._stop_writes(now_s)
        num_posted = self._post(now_s)
        num_completed = self._complete(now_s)
        return bool(num_ended or num_posted or num_completed)

    def abandon(self, reason: str) -> None:
        """Ends everything at once without knowing how it went."""
        self.retire(LinkWedged(self.peer, reason))
        for write in self._writes:
            write.future.set_exception(LinkWedged(self.peer, reason))
        self._writes.clear()

    def _settle(self, now_s: float) -> int:
        """Asks about the oldest slices until some are still under way."""
        num_ended = 0
        under_way: list[_Slice] = []
        while self._in_flight and len(under_way) < _POLL_AHEAD:
            item = self._in_flight.popleft()
            status = self._sender.check(item.ticket)
            if status == 0:
                under_way.append(item)
                continue
            num_ended += 1
            self._end(item, status, now_s)
        self._in_flight.extendleft(reversed(under_way))
        return num_ended

    def _end(self, item: _Slice, status: int, now_s: float) -> None:
        write = item.write
        write.num_outstanding -= 1
        self._in_flight_bytes -= item.num_bytes
        if status > 0:
            write.num_landed += 1
            write.landed_bytes += item.num_bytes
            return
        error = TransferFailed(self.peer, f"the data plane reported status {status}; {write.progress()}")
        write.stop(error, now_s)
        self.retire(error)

    def _stop_writes(self, now_s: float) -> None:
        for write in self._writes:
            refusal = self.refusal() if write.wants_to_post else None
            if refusal is not None:
                write.stop(refusal, now_s)
            elif write.wants_to_post and not write.is_wanted():
                write.stop(TransferRevoked(self.peer, f"no longer wanted; {write.progress()}"), now_s)
            elif now_s >= write.deadline_s:
                if write.wants_to_post:
                    write.stop(self._out_of_time(write), now_s)
                elif write.stopped_at_s is None:
                    write.stopped_at_s = now_s

    def _out_of_time(self, write: PostedWrite) -> TransferTimeout:
        if not write.num_posted:
            return LinkCrowded(self.peer, f"other writes were ahead for {write.timeout_s} s")
        return TransferTimeout(self.peer, f"{write.progress()}, and nothing more was taken within {write.timeout_s} s")

    def _post(self, now_s: float) -> int:
        num_posted = 0
        for write in self._writes:
            while write.wants_to_post and self.failure is None:
                run = write.runs[write.num_posted]
                if not self._has_room(run):
                    return num_posted
                ticket = self._sender.submit(run)
                if ticket == 0:
                    error = TransferFailed(self.peer, f"the data plane refused run {write.num_posted}")
                    write.stop(error, now_s)
                    self.retire(error)
                    break
                self._in_flight.append(_Slice(ticket, run.length_bytes, write))
                self._in_flight_bytes += run.length_bytes
                write.num_posted += 1
                write.last_post_at_s = now_s
                write.num_outstanding += 1
                num_posted += 1
        return num_posted

    def _has_room(self, run: Run) -> bool:
        if not self._in_flight:
            return True
        fits = self._in_flight_bytes + run.length_bytes <= MAX_IN_FLIGHT_BYTES
        return fits and len(self._in_flight) < MAX_IN_FLIGHT_RUNS

    def _complete(self, now_s: float) -> int:
        over = [write for write in self._writes if write.is_over or self._is_wedged(write, now_s)]
        for write in over:
            self._writes.remove(write)
            self._finish(write, now_s)
        return len(over)

    def _is_wedged(self, write: PostedWrite, now_s: float) -> bool:
        return write.stopped_at_s is not None and now_s > write.stopped_at_s + self._drain_bound_s

    def _finish(self, write: PostedWrite, now_s: float) -> None:
        if write.num_outstanding:
            reason = f"{write.num_outstanding} posted runs did not end within {self._drain_bound_s} s of the last post"
            write.error = LinkWedged(self.peer, reason)
            self.retire(write.error)
            self._in_flight = deque(item for item in self._in_flight if item.write is not write)
        if write.error is not None:
            write.future.set_exception(write.error)
            return
        write.future.set_result(
            TransferReport(
                num_bytes=write.landed_bytes,
                num_runs=write.num_landed,
                posted_at_s=write.posted_at_s,
                landed_at_s=now_s,
            )
        )


class Poller:
    """The thread. `post` and `wake` are called from any thread; futures end on this one."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._inbox: list[tuple[SendingLink, PostedWrite]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, link: SendingLink, write: PostedWrite) -> None:
        """Hands a write over. Raises `EngineClosed` after `close`."""
        with self._changed:
            if self._closed:
                raise EngineClosed(link.peer, "the engine is closed")
            self._inbox.append((link, write))
            self._changed.notify()

    def close(self) -> None:
        """Takes no more writes; the thread ends when those under way have."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        links: set[SendingLink] = set()
        try:
            while self._take(links, None):
                self._drive(links)
        except Exception:
            # A defect, not an operating error: nothing is known about what is in flight, and waiters must not hang.
            _LOG.critical("the data plane's poller failed; every write under way is given up", exc_info=True)
            self.close()
            self._take(links, 0.0)
            for link in links:
                link.abandon("the poller failed")

    def _drive(self, links: set[SendingLink]) -> None:
        """Steps until no link has anything left to do."""
        sleep_s = MIN_SLEEP_S
        while links:
            now_s = self._clock()
            moved = [link.step(now_s) for link in links]
            links -= {link for link in links if link.is_idle}
            sleep_s = MIN_SLEEP_S if any(moved) else min(sleep_s * _SLEEP_GROWTH, MAX_SLEEP_S)
            if links:
                self._take(links, sleep_s)

    def _take(self, links: set[SendingLink], sleep_s: float | None) -> bool:
        """Moves new writes to their links, after at most `sleep_s` (None: any time); False once closed and empty."""
        with self._changed:
            while not self._inbox:
                if sleep_s is None and self._closed:
                    return False
                if not self._changed.wait(sleep_s) and sleep_s is not None:
                    break
            inbox, self._inbox = self._inbox, []
        for link, write in inbox:
            link.accept(write)
            links.add(link)
        return True
