"""The writing end of a receiver-fenced connection: the futures of its writes, and the thread that drives them.

The thread sleeps in native code and comes back when writes have ended, or now and then while some are under way to ask
whether they are still wanted.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from ._native import DIGEST_KINDS, Ending, Outcome, Sender
from .engine import (
    KEY_BYTES,
    NO_KEY,
    NO_SPANS,
    XXH3,
    EngineClosed,
    LinkCrowded,
    Run,
    Spans,
    TransferError,
    TransferFailed,
    TransferRefused,
    TransferRejected,
    TransferReport,
    TransferRevoked,
    TransferTimeout,
    always_wanted,
    failed_write,
)
from .regions import OVERFLOW, RegionSet, table_rejection
from .runs import RunTable

_LOG = logging.getLogger(__name__)

# How often a write under way is asked whether it is still wanted.
_ASK_INTERVAL_S = 0.01


class LinkOwner(Protocol):
    """What a link needs of its engine."""

    @property
    def regions(self) -> RegionSet: ...

    @property
    def clock(self) -> Callable[[], float]: ...

    @property
    def progress_timeout_s(self) -> float: ...

    def check_usable(self) -> None: ...

    def is_own(self) -> bool: ...

    def forget(self, link: SocketPeerLink) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Write:
    num_runs: int
    num_bytes: int
    timeout_s: float
    posted_at_s: float
    is_wanted: Callable[[], bool]
    is_given_up: bool = False
    future: Future[TransferReport] = field(default_factory=Future)


class SocketPeerLink:
    """`PeerLink` over one connection, which it owns."""

    hashes = True

    def __init__(
        self,
        owner: LinkOwner,
        peer: str,
        connection: socket.socket,
        targets: RegionSet,
        *,
        sources: RegionSet | None,
    ) -> None:
        """`sources`: the memory that the peer has mapped; None when bytes of any registered memory are sent along."""
        self._owner = owner
        self._peer = peer
        self._connection = connection
        self._targets = targets
        self._sources = sources
        self._sender = Sender(connection.fileno(), sources is not None, owner.progress_timeout_s)
        self._lock = threading.Lock()
        self._writes: dict[int, _Write] = {}
        self._num_posted = 0
        # Why the link takes no more writes; the first reason is kept.
        self._failure: TransferError | None = None

    @property
    def peer(self) -> str:
        return self._peer

    def write(
        self,
        runs: Sequence[Run],
        *,
        key: bytes = NO_KEY,
        timeout_s: float,
        is_wanted: Callable[[], bool] = always_wanted,
        hashed: Spans = NO_SPANS,
        digest_kind: str = XXH3,
    ) -> Future[TransferReport]:
        try:
            self._owner.check_usable()
            self._check_failure()
            table = self._checked_table(runs, key)
            self._check_hashed(hashed, digest_kind)
            return self._post(table, key, timeout_s, is_wanted, hashed, digest_kind)
        except TransferError as error:
            return failed_write(error)

    def close(self) -> None:
        self.end(EngineClosed(self._peer, "the link is closed"))

    def end(self, error: TransferError) -> None:
        """Takes no more writes, for this reason, and posts nothing more of those it has."""
        if self._owner.is_own():
            with self._lock:
                self._failure = self._failure or error
            self._sender.close()

    def run(self) -> None:
        """Body of the link's thread: ends once the link was closed or has failed, with every write at its end."""
        try:
            while self._drive():
                pass
        except Exception:
            # A defect, not an operating error: waiters must not hang.
            _LOG.critical("the link to %s failed; its writes are given up", self._peer, exc_info=True)
            self._break(TransferFailed(self._peer, "the link's thread failed"))
        finally:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._owner.forget(self)

    def _check_failure(self) -> None:
        """Raises the reason of the failure."""
        if self._failure is not None:
            raise self._failure.again()

    def _checked_table(self, runs: Sequence[Run], key: bytes) -> RunTable:
        if len(key) != KEY_BYTES:
            raise TransferRejected(self._peer, f"key: {len(key)} bytes given, {KEY_BYTES} required")
        try:
            table = RunTable.of(runs)
        except OverflowError:
            raise TransferRejected(self._peer, OVERFLOW) from None
        sources = self._owner.regions if self._sources is None else self._sources
        reason = table_rejection(table, sources, self._targets)
        if reason is not None:
            raise TransferRejected(self._peer, reason)
        return table

    def _check_hashed(self, hashed: Spans, digest_kind: str) -> None:
        """Nothing is read but registered memory."""
        if digest_kind not in DIGEST_KINDS:
            raise TransferRejected(self._peer, f'digest kind "{digest_kind}" is none of {DIGEST_KINDS}')
        index = self._owner.regions.first_outside(hashed[:, 0], hashed[:, 1] - hashed[:, 0])
        if index is not None or bool((hashed[:, 0] >= hashed[:, 1]).any()):
            raise TransferRejected(self._peer, "a block to hash is empty or outside this engine's registered memory")

    def _post(
        self,
        table: RunTable,
        key: bytes,
        timeout_s: float,
        is_wanted: Callable[[], bool],
        hashed: Spans,
        digest_kind: str,
    ) -> Future[TransferReport]:
        write = _Write(
            num_runs=len(table),
            num_bytes=table.num_bytes,
            timeout_s=timeout_s,
            posted_at_s=self._owner.clock(),
            is_wanted=is_wanted,
        )
        write.future.set_running_or_notify_cancel()
        with self._lock:
            # Again, now that the thread cannot end in between: nobody would end the write.
            self._check_failure()
            self._num_posted += 1
            self._writes[self._num_posted] = write
            self._sender.post(self._num_posted, key, table.rows, timeout_s, hashed, digest_kind)
        return write.future

    def _drive(self) -> bool:
        """One round of the thread; False when it was the last."""
        endings = self._sender.drive(_ASK_INTERVAL_S)
        if self._sender.failure:
            self._break(TransferFailed(self._peer, self._sender.failure), endings)
            return False
        for ending in endings:
            self._finish(ending)
        self._ask()
        with self._lock:
            return self._failure is None or bool(self._writes)

    def _ask(self) -> None:
        with self._lock:
            unsure = [(ticket, write) for ticket, write in self._writes.items() if not write.is_given_up]
        for ticket, write in unsure:
            if not write.is_wanted():
                write.is_given_up = True
                self._sender.give_up(ticket)

    def _break(self, error: TransferError, endings: Sequence[Ending] = ()) -> None:
        """Ends everything because the connection can be used no more."""
        with self._lock:
            self._failure = self._failure or error
        for ending in endings:
            self._finish(ending)
        with self._lock:
            writes = tuple(self._writes.values())
            self._writes.clear()
        for write in writes:
            write.future.set_exception(error.again())

    def _finish(self, ending: Ending) -> None:
        with self._lock:
            write = self._writes.pop(ending.ticket)
        error = self._describe(write, ending)
        if error is not None:
            write.future.set_exception(error)
            return
        report = TransferReport(
            num_bytes=write.num_bytes,
            num_runs=write.num_runs,
            posted_at_s=write.posted_at_s,
            landed_at_s=self._owner.clock(),
            digests=ending.digests,
        )
        write.future.set_result(report)

    def _describe(self, write: _Write, ending: Ending) -> TransferError | None:
        """How the write failed, None when it did not."""
        progress = f"{ending.num_landed_bytes} of {write.num_bytes} bytes landed"
        match ending.outcome:
            case Outcome.LANDED:
                return None
            case Outcome.REFUSED:
                begin = ending.refused_address
                span = f"[{begin:#x}, {begin + ending.refused_bytes:#x})"
                return TransferRefused(
                    self._peer, f"{ending.num_refused_pieces} pieces were not granted, the first at {span}"
                )
            case Outcome.TIMED_OUT if not ending.was_begun:
                return LinkCrowded(self._peer, f"other writes were ahead for {write.timeout_s} s")
            case Outcome.TIMED_OUT:
                return TransferTimeout(self._peer, f"{progress}, and nothing more was taken within {write.timeout_s} s")
            case Outcome.GIVEN_UP if not write.is_given_up and self._failure is not None:
                return self._failure.again(progress)
            case Outcome.GIVEN_UP:
                return TransferRevoked(self._peer, f"no longer wanted; {progress}")
            case _:
                return TransferFailed(self._peer, self._sender.failure)
