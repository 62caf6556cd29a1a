"""The in-process data plane: copies between addresses of one process. For tests and for nodes in one process.

Behaves like a plane of either kind and can fail in the ways the others do, on demand and without timing: faults are
set per peer endpoint on the `MemoryFabric` that connects the engines. Knows nothing of sockets or native libraries.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from .engine import (
    NO_KEY,
    NO_SPANS,
    XXH3,
    EngineClosed,
    LinkCrowded,
    PeerUnreachable,
    PlaneKind,
    Region,
    Run,
    Spans,
    TransferError,
    TransferFailed,
    TransferRefused,
    TransferRejected,
    TransferReport,
    TransferTimeout,
    always_wanted,
    failed_write,
)
from .permit_table import PermitTable, TablePermit
from .regions import RegionSet, check_permit, open_regions, rejection


@dataclass(slots=True)
class _Faults:
    """What goes wrong on the way to one endpoint."""

    unreachable: bool = False
    held: bool = False
    runs_until_failure: int | None = None
    runs_until_flip: int | None = None


class MemoryFabric:
    """Connects the memory engines of a process and injects faults between them. Thread-safe."""

    def __init__(self) -> None:
        # Engines wait on it for work and for faults being lifted.
        self.changed = threading.Condition()
        self._engines: dict[str, MemoryEngine] = {}
        self._faults: dict[str, _Faults] = {}
        self._numbers = itertools.count(1)

    def add(self, engine: MemoryEngine) -> str:
        """Connects an engine; returns the endpoint it is reached at."""
        with self.changed:
            endpoint = f"memory:{next(self._numbers)}"
            self._engines[endpoint] = engine
            return endpoint

    def remove(self, endpoint: str) -> None:
        with self.changed:
            self._engines.pop(endpoint, None)
            self.changed.notify_all()

    def find(self, endpoint: str) -> MemoryEngine | None:
        """The engine at `endpoint`, None when there is none or a fault hides it. The caller holds `changed`."""
        return None if self.faults(endpoint).unreachable else self._engines.get(endpoint)

    def faults(self, endpoint: str) -> _Faults:
        """Live faults towards `endpoint`. The caller holds `changed`."""
        return self._faults.setdefault(endpoint, _Faults())

    def set_unreachable(self, endpoint: str, unreachable: bool = True) -> None:
        """Peers fail to open the endpoint, and writes under way to it fail."""
        with self.changed:
            self.faults(endpoint).unreachable = unreachable
            self.changed.notify_all()

    def fail_after(self, endpoint: str, num_runs: int | None) -> None:
        """Writes to the endpoint fail once `num_runs` more runs have landed; None lifts the fault."""
        with self.changed:
            self.faults(endpoint).runs_until_failure = num_runs
            self.changed.notify_all()

    def flip_bit(self, endpoint: str, num_runs: int) -> None:
        """After `num_runs` more runs to the endpoint one lands with a bit that was not sent, and nobody is told."""
        with self.changed:
            self.faults(endpoint).runs_until_flip = num_runs

    def hold(self, endpoint: str) -> None:
        """Nothing lands at the endpoint until `release`."""
        with self.changed:
            self.faults(endpoint).held = True

    def release(self, endpoint: str) -> None:
        with self.changed:
            self.faults(endpoint).held = False
            self.changed.notify_all()

    def num_unfinished_writes(self, endpoint: str) -> int:
        """Writes to the endpoint that were posted and have not ended."""
        with self.changed:
            return sum(engine.num_unfinished_writes(endpoint) for engine in self._engines.values())


@dataclass(slots=True, eq=False)
class _Write:
    link: MemoryPeerLink
    runs: Sequence[Run]
    key: bytes
    timeout_s: float
    posted_at_s: float
    deadline_s: float
    num_landed: int = 0
    num_refused: int = 0
    future: Future[TransferReport] = field(default_factory=Future)


class MemoryEngine:
    """`TransferEngine` over `memmove`, with one copying thread."""

    name = "memory"
    protocol = "memory"
    drain_bound_s = 0.0

    def __init__(
        self,
        fabric: MemoryFabric,
        *,
        kind: PlaneKind = PlaneKind.ONE_SIDED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self.num_refused_runs = 0
        self._permits = PermitTable(fabric.changed)
        self._fabric = fabric
        self._clock = clock
        self._pid = os.getpid()
        self._closed = False
        self._regions = RegionSet()
        self._queue: deque[_Write] = deque()
        self._endpoint = fabric.add(self)
        self._thread = threading.Thread(target=self._run, name=f"pdmesh-{self._endpoint}", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def regions(self) -> RegionSet:
        return self._regions

    def register(self, base_address: int, num_bytes: int, *, shared_descriptor: int | None = None) -> None:
        del shared_descriptor  # all engines of a fabric share the address space
        self.check_usable()
        with self._fabric.changed:
            self._regions = self._regions.with_region(Region(base_address=base_address, num_bytes=num_bytes))

    def allow(self, key: bytes, spans: Spans, *, hashed_as: str | None = None) -> TablePermit:
        del hashed_as  # nothing is gained by it where all memory is one process's
        self.check_usable()
        check_permit(key, spans, self._regions)
        return self._permits.allow(key, spans)

    def takes(self, key: bytes, run: Run) -> bool:
        """Whether a run may land here now; counts those that may not. The caller holds the fabric's `changed`."""
        if self.kind is PlaneKind.ONE_SIDED or self._permits.holds(key, run):
            return True
        self.num_refused_runs += 1
        return False

    def open_peer(self, endpoint: str, regions: Sequence[Region]) -> MemoryPeerLink:
        self.check_usable()
        targets = open_regions(regions)
        with self._fabric.changed:
            peer = self._fabric.find(endpoint)
            if peer is None:
                raise PeerUnreachable(endpoint, "no memory engine answers there")
            for region in targets:
                if not peer.regions.covers(region):
                    raise TransferRejected(endpoint, f"the peer does not expose {region}")
        return MemoryPeerLink(self, endpoint, targets)

    def close(self) -> None:
        self._closed = True
        self._fabric.remove(self._endpoint)

    def check_usable(self) -> None:
        """Raises `EngineClosed` when the engine is closed or was inherited by a forked child."""
        if os.getpid() != self._pid:
            raise EngineClosed(self._endpoint, f"the engine belongs to process {self._pid}, not to its forked child")
        if self._closed:
            raise EngineClosed(self._endpoint, "the engine is closed")

    def post(self, link: MemoryPeerLink, runs: Sequence[Run], key: bytes, timeout_s: float) -> Future[TransferReport]:
        now_s = self._clock()
        write = _Write(
            link=link, runs=runs, key=key, timeout_s=timeout_s, posted_at_s=now_s, deadline_s=now_s + timeout_s
        )
        write.future.set_running_or_notify_cancel()
        with self._fabric.changed:
            # Again, now that no close can come in between: nobody would end the write.
            self.check_usable()
            self._queue.append(write)
            self._fabric.changed.notify_all()
        return write.future

    def num_unfinished_writes(self, peer: str) -> int:
        """Writes to `peer` that wait or are being copied. The caller holds the fabric's `changed`."""
        return sum(write.link.peer == peer for write in self._queue)

    def wake(self) -> None:
        """Has the copying thread look at its writes again."""
        if os.getpid() == self._pid:
            with self._fabric.changed:
                self._fabric.changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._fabric.changed:
                write = self._wait_for_work()
                if write is None:
                    return
                error = self._failure(write)
                if error is None and write.num_landed < len(write.runs):
                    # Inside the lock, so that the target cannot go away with its engine in mid-copy.
                    self._copy_one(write)
                    continue
                self._queue.remove(write)
            self._finish(write, error)

    def _wait_for_work(self) -> _Write | None:
        """Blocks for a write that can go on or must end; None once closed and empty."""
        while True:
            for write in self._queue:
                if not self._fabric.faults(write.link.peer).held or self._failure(write) is not None:
                    return write
            if self._closed:
                return None
            next_deadline_s = min((write.deadline_s for write in self._queue), default=None)
            self._fabric.changed.wait(None if next_deadline_s is None else max(0.0, next_deadline_s - self._clock()))

    def _failure(self, write: _Write) -> TransferError | None:
        """Why the rest of the write must not land, None when it may."""
        peer, progress = write.link.peer, f"{write.num_landed} of {len(write.runs)} runs landed"
        if write.num_landed == len(write.runs):
            return (
                None if not write.num_refused else TransferRefused(peer, f"{write.num_refused} runs were not granted")
            )
        if write.link.failure is not None:
            return write.link.failure
        if self._closed:
            return EngineClosed(peer, f"the engine was closed; {progress}")
        if self._fabric.find(peer) is None:
            return TransferFailed(peer, f"the peer is gone; {progress}")
        if self._fabric.faults(peer).runs_until_failure == 0:
            return TransferFailed(peer, f"injected failure; {progress}")
        if self._clock() >= write.deadline_s:
            if not write.num_landed and self._is_behind_others(write):
                return LinkCrowded(peer, f"other writes were ahead for {write.timeout_s} s")
            return TransferTimeout(peer, f"{progress} within {write.timeout_s} s")
        return None

    def _is_behind_others(self, write: _Write) -> bool:
        ahead = itertools.takewhile(lambda other: other is not write, self._queue)
        return any(other.link is write.link for other in ahead)

    def _copy_one(self, write: _Write) -> None:
        run = write.runs[write.num_landed]
        receiver = self._fabric.find(write.link.peer)
        if receiver is not None and receiver.takes(write.key, run):
            ctypes.memmove(run.target_address, run.source_address, run.length_bytes)
        else:
            write.num_refused += 1
        write.num_landed += 1
        faults = self._fabric.faults(write.link.peer)
        if faults.runs_until_flip is not None:
            if faults.runs_until_flip == 0:
                ctypes.c_ubyte.from_address(run.target_address + run.length_bytes // 2).value ^= 1
            faults.runs_until_flip = faults.runs_until_flip - 1 if faults.runs_until_flip else None
        if faults.runs_until_failure is not None:
            faults.runs_until_failure -= 1

    def _finish(self, write: _Write, error: TransferError | None) -> None:
        if error is not None:
            if not error.spares_peer:
                write.link.retire(error)
            write.future.set_exception(error.again())
            return
        write.future.set_result(
            TransferReport(
                num_bytes=sum(run.length_bytes for run in write.runs),
                num_runs=len(write.runs),
                posted_at_s=write.posted_at_s,
                landed_at_s=self._clock(),
            )
        )


class MemoryPeerLink:
    """`PeerLink` into another memory engine of the process."""

    hashes = False

    def __init__(self, engine: MemoryEngine, peer: str, targets: RegionSet) -> None:
        self._engine = engine
        self._peer = peer
        self._targets = targets
        # Why the link takes no more writes.
        self.failure: TransferError | None = None

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
        del is_wanted, hashed, digest_kind  # every run counts as posted at once
        try:
            self._engine.check_usable()
            if self.failure is not None:
                return failed_write(self.failure.again())
            reason = rejection(runs, self._engine.regions, self._targets)
            if reason is not None:
                return failed_write(TransferRejected(self._peer, reason))
            return self._engine.post(self, tuple(runs), key, timeout_s)
        except TransferError as error:
            return failed_write(error)

    def close(self) -> None:
        self.retire(EngineClosed(self._peer, "the link is closed"))
        self._engine.wake()

    def retire(self, error: TransferError) -> None:
        if self.failure is None:
            self.failure = error
