"""The two clocks of a node, behind one seam so that tests and the simulator can drive time themselves.

Durations, deadlines and timings are monotonic seconds; only spans and log lines use the time of day.
"""

from __future__ import annotations

import time
from typing import Protocol

_NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """Source of time."""

    def now_s(self) -> float:
        """Monotonic seconds from an arbitrary origin."""
        ...

    def unix_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        ...

    def unix_ns_at(self, monotonic_s: float) -> int:
        """The time of day at which `now_s` read `monotonic_s`, in nanoseconds since the Unix epoch."""
        ...


class SystemClock:
    """The clocks of the operating system. Stateless, safe from every thread."""

    __slots__ = ()

    def now_s(self) -> float:
        return time.monotonic()

    def unix_ns(self) -> int:
        return time.time_ns()

    def unix_ns_at(self, monotonic_s: float) -> int:
        return time.time_ns() - round((time.monotonic() - monotonic_s) * _NS_PER_S)


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

    def unix_ns(self) -> int:
        return self.unix_ns_at(self._now_s)

    def unix_ns_at(self, monotonic_s: float) -> int:
        return self._epoch_ns + round(monotonic_s * _NS_PER_S)
