"""The writes of one handoff: posted by the engine thread, landed on the data plane's, stopped by the event loop.

This is where the writer fences itself: `stop` and `post` exclude each other, so after `stop` returned nothing more is
handed to the data plane, which drops what waits for room there; the end of the lease does the same by the clock, should
nobody be there to call `stop`. `TransferDrained` follows only when every write is terminal. It knows no blocks and no
scheduler; the handoff that owns it hears of everything through `notify`, which must not block.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

from cache_runtime.transfer.engine import (
    NO_SPANS,
    XXH3,
    LinkWedged,
    PeerLink,
    Run,
    Spans,
    TransferReport,
    TransferRevoked,
)

_log = logging.getLogger(__name__)


class BusySpan(NamedTuple):
    """A time during which at least one write was outstanding: monotonic seconds, `begin_s` <= `end_s`."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSummary:
    """What a complete transfer moved, and when. `busy` is in order and disjoint; empty: there was nothing to write."""

    num_bytes: int
    num_runs: int
    busy: tuple[BusySpan, ...]

    def busy_s(self, since_s: float = -math.inf) -> float:
        """Time during which at least one write was outstanding, counted from `since_s` on."""
        return sum(max(0.0, span.end_s - max(span.begin_s, since_s)) for span in self.busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLanded:
    """Everything was posted and has landed."""

    summary: TransferSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFault:
    """A write failed or could not be planned; nothing further is posted, others may still be on their way."""

    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferDrained:
    """After `stop`: no posted write is outstanding."""


TransferNews: TypeAlias = TransferLanded | TransferFault | TransferDrained


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedWrite:
    """A write of which checksums are wanted.

    `blocks`: those of the sources that the link is to hash, in digests of `kind`; empty when somebody else does.
    `on_landed` is called on the data plane's thread with their digests when all of the write has landed, and must not
    block.
    """

    blocks: Spans
    kind: str = XXH3
    on_landed: Callable[[bytes], None]


class OutgoingTransfer:
    """The writes of one handoff over one peer link. Thread-safe."""

    def __init__(
        self,
        link: PeerLink,
        notify: Callable[[TransferNews], None],
        *,
        key: bytes,
        now_s: Callable[[], float],
        write_timeout_s: float,
        post_until_s: float = math.inf,
    ) -> None:
        """
        Args:
            key: Names the grant to a receiver that checks what it places.
            now_s: The node's monotonic clock, read on every thread.
            write_timeout_s: How long one write may wait for its turn on the link, and then for more of it to be taken.
            post_until_s: When the lease ends as far as posting is concerned.
        """
        self._link = link
        self._key = key
        self._notify = notify
        self._now_s = now_s
        self._write_timeout_s = write_timeout_s
        self._post_until_s = post_until_s
        self._lock = threading.Lock()
        self._num_outstanding = 0
        self._is_wedged = False
        self._is_stopped = False
        self._is_complete = False
        self._has_landed = False
        self._has_drained = False
        self._fault: Exception | None = None
        self._num_bytes = 0
        self._num_runs = 0
        self._spans: list[BusySpan] = []

    @property
    def num_landed_runs(self) -> int:
        """Grows while the transfer gets on."""
        return self._num_runs

    def extend(self, post_until_s: float) -> None:
        """The lease was renewed."""
        self._post_until_s = post_until_s

    def post(self, runs: Sequence[Run], hashed: HashedWrite | None = None) -> None:
        """Posts a write; does nothing once the transfer was stopped or has failed, and fails it after the lease."""
        refusal: Exception | None = None
        with self._lock:
            if self._is_stopped or self._fault is not None:
                return
            try:
                self._check_lease()
                future = self._link.write(
                    runs,
                    key=self._key,
                    timeout_s=self._write_timeout_s,
                    is_wanted=self._is_wanted,
                    hashed=NO_SPANS if hashed is None else hashed.blocks,
                    digest_kind=XXH3 if hashed is None else hashed.kind,
                )
                self._num_outstanding += 1
            except Exception as error:
                refusal = self._fault = error
        if refusal is not None:
            self._notify(TransferFault(error=refusal))
            return
        # Outside the lock: a future that is already done calls back right here. Whatever else has happened by now, this
        # write counts as outstanding until it is terminal.
        future.add_done_callback(partial(self._on_terminal, hashed))

    def fail(self, error: Exception) -> None:
        """Gives the transfer up for a fault found before anything was posted for it."""
        with self._lock:
            is_first = self._fault is None and not self._is_stopped
            self._fault = self._fault or error
        if is_first:
            self._notify(TransferFault(error=error))

    def complete(self) -> None:
        """Declares that nothing more will be posted."""
        with self._lock:
            self._is_complete = True
            news = self._news()
        self._tell(news)

    def stop(self) -> None:
        """Posts nothing any more. TransferDrained follows, at once when nothing is outstanding. Idempotent."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            news = self._news()
        self._tell(news)

    def _is_wanted(self) -> bool:
        """Whether what was handed to the data plane may still be posted. Called by its thread, without the lock."""
        return not self._is_stopped and self._fault is None and self._now_s() < self._post_until_s

    def _check_lease(self) -> None:
        if self._now_s() >= self._post_until_s:
            raise TransferRevoked(self._link.peer, "the lease of the grant is over")

    def _on_terminal(self, hashed: HashedWrite | None, future: Future[TransferReport]) -> None:
        error = future.exception()
        if error is None and hashed is not None:
            hashed.on_landed(future.result().digests)
        with self._lock:
            self._num_outstanding -= 1
            is_new_fault = False
            if error is None:
                self._count(future.result())
            else:
                self._is_wedged = self._is_wedged or isinstance(error, LinkWedged)
                is_new_fault = self._fault is None
                self._fault = self._fault or (error if isinstance(error, Exception) else RuntimeError(str(error)))
            fault = self._fault if is_new_fault and not self._is_stopped else None
            news = self._news()
        if isinstance(error, LinkWedged):
            _log.critical(
                "%s; the blocks of this handoff stay out of use because bytes may still move. Restart this node.", error
            )
        if fault is not None:
            self._notify(TransferFault(error=fault))
        self._tell(news)

    def _count(self, report: TransferReport) -> None:
        self._num_bytes += report.num_bytes
        self._num_runs += report.num_runs
        self._spans.append(BusySpan(report.posted_at_s, report.landed_at_s))

    def _news(self) -> TransferNews | None:
        """The end that has just been reached, told once. The caller holds the lock.

        A wedged link never drains: what it posted may be read and written at any later time.
        """
        if self._num_outstanding or self._is_wedged:
            return None
        if self._is_stopped:
            was_drained, self._has_drained = self._has_drained, True
            return None if was_drained else TransferDrained()
        if not self._is_complete or self._has_landed or self._fault is not None:
            return None
        self._has_landed = True
        return TransferLanded(
            summary=TransferSummary(num_bytes=self._num_bytes, num_runs=self._num_runs, busy=merge_spans(self._spans))
        )

    def _tell(self, news: TransferNews | None) -> None:
        if news is not None:
            self._notify(news)


def merge_spans(spans: Sequence[BusySpan]) -> tuple[BusySpan, ...]:
    """The union of the spans of single writes."""
    merged: list[BusySpan] = []
    for span in sorted(spans):
        if merged and span.begin_s <= merged[-1].end_s:
            merged[-1] = BusySpan(merged[-1].begin_s, max(merged[-1].end_s, span.end_s))
        else:
            merged.append(span)
    return tuple(merged)
