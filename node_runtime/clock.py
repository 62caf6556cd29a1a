"""The two clocks of a node, behind one seam so that tests and the simulator can drive time themselves.

Durations, deadlines and timings are monotonic seconds; only spans and log lines use the time of day.
"""

from __future__ import annotations

import time
from typing import Protocol

_NS_PER_S = 1_000_000_000
_EPOCH_TRIES = 5


class Clock(Protocol):
    """Source of time."""

    def now_s(self) -> float:
        """Monotonic seconds from an arbitrary origin."""
        ...

    def unix_ns_at(self, monotonic_s: float) -> int:
        """The time of day at which `now_s` read `monotonic_s`, in nanoseconds since the Unix epoch."""
        ...


class SystemClock:
    """The clocks of the operating system. Safe from every thread.

    Moments become times of day by one offset, measured when the clock is made: a moment has one time of day, however
    often it is asked for, and what came later is later. A time of day that is set anew meanwhile is not followed.
    """

    __slots__ = ("_epoch_ns",)

    def __init__(self) -> None:
        self._epoch_ns = _measured_epoch_ns()

    def now_s(self) -> float:
        return time.monotonic()

    def unix_ns_at(self, monotonic_s: float) -> int:
        return self._epoch_ns + round(monotonic_s * _NS_PER_S)


def _measured_epoch_ns() -> int:
    """The time of day at which the monotonic clock read 0. The best of a few tries: a thread may lose the processor
    between the readings.
    """
    tries = []
    for _ in range(_EPOCH_TRIES):
        before_ns, unix_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after_ns - before_ns, unix_ns - (before_ns + after_ns) // 2))
    return min(tries)[1]


class ManualClock:
    """A clock that stands still until it is told otherwise. For tests and simulation; not thread-safe."""

    __slots__ = ("_epoch_ns", "_now_s")

    def __init__(self, now_s: float = 0.0, epoch_ns: int = 0) -> None:
        """`epoch_ns` is the time of day at which `now_s` is 0."""
        self._now_s = now_s
        self._epoch_ns = epoch_ns

    def advance(self, seconds: float) -> None:
        """Moves time forward. Raises ValueError when `seconds` is negative."""
        if seconds < 0:
            raise ValueError(f"seconds must be >= 0, got {seconds}")
        self._now_s += seconds

    def now_s(self) -> float:
        return self._now_s

    def unix_ns_at(self, monotonic_s: float) -> int:
        return self._epoch_ns + round(monotonic_s * _NS_PER_S)
