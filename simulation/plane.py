"""The data plane of a simulated node: writes that take time, land in any order, and fail.

A write posts its runs in windows, as the real wrapper does: what is posted is the network's and lands even while its
writer is stopped, and for up to the drain bound after its writer died; what is not posted yet is the process's and
waits with it. On a two-sided plane the receiving process places the bytes, if a permit holds them at that instant. It
knows no block and no grant: whoever watches is told of every landing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from cache_runtime.transfer.engine import (
    NO_KEY,
    NO_SPANS,
    XXH3,
    EngineClosed,
    PeerUnreachable,
    Permit,
    PlaneKind,
    Region,
    Run,
    Spans,
    StandingPermit,
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
from cache_runtime.transfer.permit_table import PermitTable
from cache_runtime.transfer.regions import RegionSet, open_regions, rejection
from simulation.dice import Dice
from simulation.kernel import Process, World

PLANE_NAME = "simulated"
DRAIN_BOUND_S = 2.0
_LANDING_S = (0.0001, 0.004)
_WINDOW_RUNS = 4
_PROGRESS_TIMEOUT_S = 1.0
_MAX_PROGRESS_CHECKS = 4


class WriteWatcher(Protocol):
    """Sees every run that arrives."""

    def on_landed(self, source: SimulatedPlane, target: SimulatedPlane, run: Run) -> None:
        """The bytes are in the target's memory now."""
        ...

    def on_damaged(self) -> None:
        """The run that is about to be reported has arrived with a wrong bit."""
        ...


@dataclass(slots=True, eq=False)
class _Write:
    link: _Link
    runs: tuple[Run, ...]
    key: bytes
    is_wanted: Callable[[], bool]
    timeout_s: float
    posted_at_s: float
    deadline_s: float
    num_posted: int = 0
    in_flight: set[Run] = field(default_factory=set)
    error: TransferError | None = None
    future: Future[TransferReport] = field(default_factory=Future)


class DataNetwork:
    """All data planes of a world, and what befalls the writes between them."""

    def __init__(
        self, world: World, dice: Dice, watcher: WriteWatcher, *, kind: PlaneKind, extra_landing_s: float
    ) -> None:
        """`extra_landing_s` is added, in part, to the time that each run takes."""
        self.kind = kind
        self._extra_landing_s = extra_landing_s
        self.world = world
        self._dice = dice
        self.watcher = watcher
        # Landings are nobody's process: they happen whatever becomes of the writer.
        self.carrier = Process(world, "data network", lambda message, error: None)
        self._planes: dict[str, SimulatedPlane] = {}
        self._blocked: set[tuple[str, str]] = set()
        self._slow_s: dict[str, float] = {}
        # (source, target): runs until one is lost.
        self.runs_until_loss: dict[tuple[str, str], int] = {}
        # (source, target): runs until one arrives with a wrong bit.
        self.runs_until_flip: dict[tuple[str, str], int] = {}

    def add(self, plane: SimulatedPlane) -> None:
        self._planes[plane.endpoint] = plane

    def find(self, endpoint: str) -> SimulatedPlane | None:
        return self._planes.get(endpoint)

    def block(self, source: str, target: str) -> None:
        """No byte gets from one process to the other until `unblock`."""
        self._blocked.add((source, target))

    def unblock(self, source: str, target: str) -> None:
        self._blocked.discard((source, target))

    def is_blocked(self, source: str, target: str) -> bool:
        return (source, target) in self._blocked

    def slow_down(self, name: str, seconds: float) -> None:
        """Adds up to so much to the landing of each run from or to a process."""
        self._slow_s[name] = seconds

    def landing_s(self, source: str, target: str) -> float:
        extra_s = self._extra_landing_s + self._slow_s.get(source, 0.0) + self._slow_s.get(target, 0.0)
        dice = self._dice.of("landing", source, target)
        return dice.uniform(*_LANDING_S) + extra_s * dice.random()

    def flip_bit(self, source: str, target: str, run: Run) -> None:
        """One bit of a run that has just landed."""
        dice = self._dice.of("bit", source, target)
        address = run.target_address + dice.randrange(run.length_bytes)
        ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ (1 << dice.randrange(8)), 1)

    def drop_process(self, process: Process) -> None:
        """Its memory is gone; what it had posted may still land elsewhere, within the drain bound."""
        for plane in list(self._planes.values()):
            if plane.process is process:
                del self._planes[plane.endpoint]

    def takes(self, counts: dict[tuple[str, str], int], source: str, target: str) -> bool:
        """Counts a run down; True for the one that is hit."""
        left = counts.get((source, target))
        if left is None:
            return False
        if left > 0:
            counts[source, target] = left - 1
            return False
        del counts[source, target]
        return True


class SimulatedPlane:
    """`TransferEngine` of one process."""

    name = PLANE_NAME
    protocol = PLANE_NAME

    def __init__(self, network: DataNetwork, process: Process, endpoint: str) -> None:
        self.network = network
        self.process = process
        self.regions = RegionSet()
        self._endpoint = endpoint
        self._is_closed = False
        self._permits = PermitTable(nullcontext())
        self.num_refused_runs = 0
        network.add(self)

    @property
    def kind(self) -> PlaneKind:
        return self.network.kind

    @property
    def drain_bound_s(self) -> float:
        return DRAIN_BOUND_S if self.kind is PlaneKind.ONE_SIDED else 0.0

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def register(self, base_address: int, num_bytes: int, *, shared_descriptor: int | None = None) -> None:
        del shared_descriptor
        self.regions = self.regions.with_region(Region(base_address=base_address, num_bytes=num_bytes))

    def allow(self, key: bytes, spans: Spans, *, hashed_as: str | None = None) -> Permit:
        del hashed_as  # bytes are read when they are compared
        return StandingPermit() if self.kind is PlaneKind.ONE_SIDED else self._permits.allow(key, spans)

    def permits(self, key: bytes, run: Run) -> bool:
        """Whether the receiver may place the run now; a one-sided plane is not asked."""
        return self.kind is PlaneKind.ONE_SIDED or self._permits.holds(key, run)

    def open_peer(self, endpoint: str, regions: Sequence[Region]) -> _Link:
        targets = open_regions(regions)
        peer = self.network.find(endpoint)
        names = (self.process.name, "" if peer is None else peer.process.name)
        if peer is None or self.network.is_blocked(*names) or self.network.is_blocked(*reversed(names)):
            raise PeerUnreachable(endpoint, "nobody answers there")
        for region in targets:
            if not peer.regions.covers(region):
                raise TransferRejected(endpoint, f"the peer does not expose {region}")
        return _Link(self, peer, targets)

    def close(self) -> None:
        self._is_closed = True

    @property
    def is_closed(self) -> bool:
        return self._is_closed


class _Link:
    """`PeerLink` to one incarnation of a peer."""

    hashes = False

    def __init__(self, plane: SimulatedPlane, target: SimulatedPlane, regions: RegionSet) -> None:
        self._plane = plane
        self._target = target
        self._regions = regions
        self._failure: TransferError | None = None

    @property
    def peer(self) -> str:
        return self._target.endpoint

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
        del hashed, digest_kind  # as it said that it hashes nothing
        if self._plane.is_closed:
            return failed_write(EngineClosed(self.peer, "the engine is closed"))
        if self._failure is not None:
            return failed_write(self._failure.again())
        reason = rejection(runs, self._plane.regions, self._regions)
        if reason is not None:
            return failed_write(TransferRejected(self.peer, reason))
        now_s = self._plane.process.world.now_s
        write = _Write(
            link=self,
            runs=tuple(runs),
            key=key,
            is_wanted=is_wanted,
            timeout_s=timeout_s,
            posted_at_s=now_s,
            deadline_s=now_s + timeout_s,
        )
        write.future.set_running_or_notify_cancel()
        self._go_on(write)
        return write.future

    def close(self) -> None:
        self._retire(EngineClosed(self.peer, "the link is closed"))

    def _retire(self, error: TransferError) -> None:
        if self._failure is None:
            self._failure = error

    def _go_on(self, write: _Write) -> None:
        """Posts what the window has room for; ends the write when nothing is in flight and nothing will be."""
        while write.error is None and write.num_posted < len(write.runs) and len(write.in_flight) < _WINDOW_RUNS:
            write.error = self._refusal(write)
            if write.error is None:
                self._post(write, write.runs[write.num_posted])
        if write.in_flight or (write.error is None and write.num_posted < len(write.runs)):
            return
        # Later, and while the process runs: the poller's thread reports it.
        self._plane.process.call_soon(self._end, write)

    def _refusal(self, write: _Write) -> TransferError | None:
        """Why nothing more is posted. The first window is what the caller asked for just now."""
        if self._failure is not None:
            return self._failure.again()
        if write.num_posted and not write.is_wanted():
            return TransferRevoked(self.peer, "given up")
        if self._plane.process.world.now_s >= write.deadline_s:
            return TransferTimeout(self.peer, f"not posted within {write.timeout_s} s")
        return None

    def _post(self, write: _Write, run: Run) -> None:
        network, source, target = self._plane.network, self._plane, self._target
        write.num_posted += 1
        write.in_flight.add(run)
        names = (source.process.name, target.process.name)
        is_lost = network.takes(network.runs_until_loss, *names)
        delay_s = _PROGRESS_TIMEOUT_S if is_lost else network.landing_s(*names)
        network.carrier.call_later(min(delay_s, DRAIN_BOUND_S * 0.9), self._arrive, write, run, is_lost)

    def _arrive(self, write: _Write, run: Run, is_lost: bool) -> None:
        """On the network: the bytes land, or it is clear that they never will."""
        network, source, target = self._plane.network, self._plane, self._target
        names = (source.process.name, target.process.name)
        if not is_lost and network.is_blocked(*names):
            network.carrier.call_later(_PROGRESS_TIMEOUT_S, self._arrive, write, run, True)
            return
        is_alive = network.find(target.endpoint) is target
        if is_lost or not is_alive:
            self._plane.process.call_soon(self._complete, write, run, TransferFailed(self.peer, "a run was lost"))
        elif target.kind is PlaneKind.ONE_SIDED:
            self._place(write, run)
        else:
            # Where the receiver has to do it: when it runs.
            target.process.call_soon(self._place, write, run)
            network.carrier.call_later(_PROGRESS_TIMEOUT_S, self._check_placed, write, run, _MAX_PROGRESS_CHECKS)

    def _check_placed(self, write: _Write, run: Run, num_left: int) -> None:
        """A receiver that is gone places nothing, and one that sleeps is not waited for without end."""
        if run not in write.in_flight:
            return
        if self._target.process.is_dead or not num_left:
            error = TransferFailed(self.peer, "the receiver does not answer")
            self._plane.process.call_soon(self._complete, write, run, error)
        else:
            self._plane.network.carrier.call_later(_PROGRESS_TIMEOUT_S, self._check_placed, write, run, num_left - 1)

    def _place(self, write: _Write, run: Run) -> None:
        network, source, target = self._plane.network, self._plane, self._target
        names = (source.process.name, target.process.name)
        error: TransferError | None = None
        if target.permits(write.key, run):
            ctypes.memmove(run.target_address, run.source_address, run.length_bytes)
            if network.takes(network.runs_until_flip, *names):
                network.flip_bit(*names, run)
                network.watcher.on_damaged()
            network.watcher.on_landed(source, target, run)
        else:
            target.num_refused_runs += 1
            error = TransferRefused(self.peer, "a run was not granted")
        self._plane.process.call_soon(self._complete, write, run, error)

    def _complete(self, write: _Write, run: Run, error: TransferError | None) -> None:
        write.in_flight.discard(run)
        write.error = write.error or error
        self._go_on(write)

    def _end(self, write: _Write) -> None:
        if write.future.done():
            return
        if write.error is None:
            num_bytes = sum(run.length_bytes for run in write.runs)
            report = TransferReport(
                num_bytes=num_bytes,
                num_runs=len(write.runs),
                posted_at_s=write.posted_at_s,
                landed_at_s=self._plane.process.world.now_s,
            )
            write.future.set_result(report)
            return
        if not write.error.spares_peer:
            self._retire(write.error)
        write.future.set_exception(write.error)
