"""Tells a node that is busy from one that is stuck: whoever restarts it must know.

Knows of the engine only since when its present iteration lasts, and of the node only whom to tell.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from node_runtime.clock import Clock

_MAX_INTERVAL_S = 5.0
_LOOKS_PER_TIMEOUT = 4

_log = logging.getLogger(__name__)


class BusySince(Protocol):
    """What iterates."""

    @property
    def busy_since_s(self) -> float | None:
        """When the iteration under way began, by the node's clock; None while there is nothing to do."""
        ...


async def watch_progress(
    engine: BusySince, clock: Clock, *, stall_timeout_s: float, set_alive: Callable[[bool], None]
) -> None:
    """Calls `set_alive` whenever the engine gets stuck in one iteration for that long, or is free again. Runs until it
    is cancelled.
    """
    was_alive = True
    while True:
        await asyncio.sleep(min(_MAX_INTERVAL_S, stall_timeout_s / _LOOKS_PER_TIMEOUT))
        since_s = engine.busy_since_s
        stuck_s = 0.0 if since_s is None else clock.now_s() - since_s
        is_alive = stuck_s < stall_timeout_s
        if is_alive != was_alive:
            was_alive = is_alive
            if is_alive:
                _log.warning("the engine goes on; the node is alive")
            else:
                _log.error("one step of the engine has taken %.0f s: the node is not alive any more", stuck_s)
            set_alive(is_alive)
