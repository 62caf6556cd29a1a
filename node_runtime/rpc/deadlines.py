"""The deadline of the call being served, so that every call made on its behalf inherits it.

A context variable carries it: set by the server around each handler, read by the client side. Time is the event
loop's, as it is for asyncio's own timeouts.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager
from contextvars import ContextVar

from node_runtime.errors import DeadlineExceeded

_deadline_s: ContextVar[float | None] = ContextVar("pdmesh_deadline", default=None)


def _now_s() -> float:
    """Monotonic seconds: the running event loop's, which is the system's clock unless the loop is a simulated one."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def deadline_within(seconds: float) -> AbstractContextManager[None]:
    """Bounds every call made inside to `seconds` from now; an earlier deadline stays in force."""
    return _Deadline(seconds)


class _Deadline:
    """A class and no generator, because every call that is served has one."""

    __slots__ = ("_seconds", "_token")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        outer = _deadline_s.get()
        own = _now_s() + self._seconds
        self._token = _deadline_s.set(own if outer is None else min(outer, own))

    def __exit__(self, *exc_info: object) -> None:
        _deadline_s.reset(self._token)


def remaining_s() -> float | None:
    """Seconds until the current deadline, never negative; None outside of a call."""
    deadline = _deadline_s.get()
    return None if deadline is None else max(0.0, deadline - _now_s())


def call_timeout_s(timeout_s: float | None) -> float:
    """The timeout of an outgoing call: `timeout_s`, cut to the current deadline.

    Raises DeadlineExceeded when that has passed, and ValueError when there is neither: no call waits for ever.
    """
    remaining = remaining_s()
    if remaining is None:
        if timeout_s is None:
            raise ValueError("an outgoing call needs timeout_s or a deadline in force")
        return timeout_s
    if remaining <= 0:
        raise DeadlineExceeded("the deadline passed before the next call could start")
    return remaining if timeout_s is None else min(timeout_s, remaining)
