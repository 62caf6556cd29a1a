"""What may go wrong in a simulated mesh, and what operators do to it: plain values, each with the time it begins at.

Times are seconds since the start of the world. `str` of a fault is its line in a transcript.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import TypeAlias

from simulation.network import Meddling


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A process dies; `silently`: its machine does. It is started again after a while."""

    host: str
    at_s: float
    restart_after_s: float
    silently: bool = False

    def __str__(self) -> str:
        what = "the power of" if self.silently else "kill -9 ends"
        cut = " is cut" if self.silently else ""
        return f"{what} {self.host}{cut}; it is started again after {self.restart_after_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRank:
    """The second tensor rank of a node dies, and the node with it. Without effect on a node of one rank."""

    host: str
    at_s: float
    restart_after_s: float

    def __str__(self) -> str:
        return f"rank 1 of {self.host} dies; the node is started again {self.restart_after_s:g} s after it has left"


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRank:
    """The second tensor rank of a node hears and answers late for a while. Without effect on a node of one rank."""

    host: str
    at_s: float
    for_s: float
    seconds: float

    def __str__(self) -> str:
        return f"rank 1 of {self.host} is late by up to {self.seconds:g} s, for {self.for_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A process is stopped and goes on later."""

    host: str
    at_s: float
    for_s: float

    def __str__(self) -> str:
        return f"{self.host} is stopped (SIGSTOP) for {self.for_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The engine of a node stands still and goes on later; the rest of its process answers meanwhile."""

    host: str
    at_s: float
    for_s: float

    def __str__(self) -> str:
        return f"the engine of {self.host} hangs for {self.for_s:g} s"


@unique
class Asking(Enum):
    """How an operator asks a node to leave."""

    SIGNAL = "SIGTERM"
    CALL = "the Drain call"
    BOTH = "the Drain call and SIGTERM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A node is told to stop in good order, and is started again some time after it has."""

    host: str
    at_s: float
    restart_after_s: float
    asking: Asking = Asking.SIGNAL

    def __str__(self) -> str:
        return f"{self.asking.value} asks {self.host} to leave; it is started again {self.restart_after_s:g} s later"


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingRestart:
    """Nodes are drained and started again one after another: the next one `pause_s` after the one before it serves."""

    hosts: tuple[str, ...]
    at_s: float
    restart_after_s: float
    pause_s: float
    asking: Asking = Asking.SIGNAL

    def __str__(self) -> str:
        return (
            f"rolling restart by {self.asking.value} of {', '.join(self.hosts)}: each is started "
            f"{self.restart_after_s:g} s after it left, the next follows {self.pause_s:g} s after it serves"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearCache:
    """An operator asks a node to drop its prefix cache."""

    host: str
    at_s: float

    def __str__(self) -> str:
        return f"an operator clears the prefix cache of {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Nothing gets from `source` to `target`; `is_mutual`: nor back."""

    source: str
    target: str
    at_s: float
    for_s: float
    control: bool
    data: bool
    is_mutual: bool

    def __str__(self) -> str:
        what = " and ".join(
            name for name, is_cut in (("control messages", self.control), ("cache bytes", self.data)) if is_cut
        )
        way = "either way between" if self.is_mutual else "from"
        ends = f"{self.source} {'and' if self.is_mutual else 'to'} {self.target}"
        return f"no {what} {way} {ends} for {self.for_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A host answers, computes and moves bytes slowly for a while."""

    host: str
    at_s: float
    for_s: float
    control_s: float
    data_s: float
    compute_factor: float

    def __str__(self) -> str:
        return (
            f"{self.host} is slow for {self.for_s:g} s: messages up to {self.control_s:g} s, writes up to "
            f"{self.data_s:g} s late, computing {self.compute_factor:g} times as long"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeddleWith:
    """Something happens to `num_frames` frames, from the `nth` (from 0) on, that go from `source` to `target` after
    `at_s`; for faults of handoff messages only those are counted.
    """

    source: str
    target: str
    at_s: float
    nth: int
    num_frames: int
    kind: Meddling
    seconds: float = 0.0

    def __str__(self) -> str:
        what = {
            Meddling.BREAK: "breaks the connection",
            Meddling.DELAY: f"is {self.seconds:g} s late",
            Meddling.DUPLICATE: "arrives twice",
            Meddling.REPLAY: "comes behind an old one that is sent again",
        }[self.kind]
        frames = f"message {self.nth + 1}" if self.num_frames == 1 else f"each of messages {self.nth + 1} and on"
        limit = "" if self.num_frames == 1 else f" ({self.num_frames} of them)"
        return f"from now on {frames} from {self.source} to {self.target} {what}{limit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseRun:
    """The `nth` run that is posted from `source` to `target` after `at_s` never lands."""

    source: str
    target: str
    at_s: float
    nth: int

    def __str__(self) -> str:
        return f"write {self.nth + 1} from now on from {self.source} to {self.target} is lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipBit:
    """The `nth` run that lands on `target` from `source` after `at_s` arrives with one wrong bit."""

    source: str
    target: str
    at_s: float
    nth: int

    def __str__(self) -> str:
        return f"write {self.nth + 1} from now on from {self.source} to {self.target} arrives with a wrong bit"


Fault: TypeAlias = (
    Kill
    | KillRank
    | LateRank
    | Stop
    | Hang
    | Drain
    | RollingRestart
    | ClearCache
    | Partition
    | Slow
    | MeddleWith
    | LoseRun
    | FlipBit
)


def hosts_of(fault: Fault) -> frozenset[str]:
    """Every host that a fault concerns. Clearing a cache concerns nobody: it is refused while anybody is served."""
    match fault:
        case Kill() | KillRank() | LateRank() | Stop() | Hang() | Drain() | Slow():
            return frozenset((fault.host,))
        case RollingRestart():
            return frozenset(fault.hosts)
        case ClearCache():
            return frozenset()
        case Partition() | MeddleWith() | LoseRun() | FlipBit():
            return frozenset((fault.source, fault.target))


def end_of(fault: Fault) -> float:
    """When a fault is over at the latest; of what operators do, when it begins."""
    match fault:
        case Kill():
            return fault.at_s + fault.restart_after_s
        case Stop() | Hang() | Partition() | Slow() | LateRank():
            return fault.at_s + fault.for_s
        case KillRank() | Drain() | RollingRestart() | ClearCache() | MeddleWith() | LoseRun() | FlipBit():
            return fault.at_s


def name_of(fault: Fault) -> str:
    """What kind of fault it is, in a word or two."""
    match fault:
        case MeddleWith():
            return f"message: {fault.kind.value}"
        case _:
            return "".join(f" {char.lower()}" if char.isupper() else char for char in type(fault).__name__).lstrip()
