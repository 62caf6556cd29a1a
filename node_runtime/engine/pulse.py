"""Whether an engine gets anywhere: what tells waiting from hanging.

An engine that computes moves by itself, an idle one when it is asked to. `EnginePulse` looks for one request,
`EngineWatch` for the whole node. Both live on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import Nudge

_log = logging.getLogger(__name__)

# Longer than one layer takes of the largest chunk on the slowest machine, and a request may wait for it.
STALL_BOUND_S: Final = 10.0
_NUM_LOOKS: Final = 10


class EnginePulse:
    """Ask it from time to time."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._seen = engine.num_pulses
        self._was_asked = False

    def has_moved(self) -> bool:
        """Whether the engine has done anything since the last call, or since this was made.

        An engine that had nothing to do is given something, so that the next call finds it well.
        """
        num_pulses = self._engine.num_pulses
        has_moved, self._seen = num_pulses != self._seen, num_pulses
        if has_moved or not self._was_asked:
            # At most one is on its way: an engine that stands still is not buried under questions.
            self._was_asked = True
            self._engine.post(Nudge())
        return has_moved


class EngineWatch:
    """Looks again and again while `run` runs; an engine that has not moved for several looks stands still."""

    def __init__(
        self, engine: EngineLoop, *, on_change: Callable[[], None], stall_bound_s: float = STALL_BOUND_S
    ) -> None:
        """`on_change` is called when the engine has come to a standstill, and when it has moved again."""
        self._pulse = EnginePulse(engine)
        self._on_change = on_change
        self._stall_bound_s = stall_bound_s
        self._num_still = 0

    @property
    def is_stalled(self) -> bool:
        """Whether the engine stands still. It may yet go on."""
        return self._num_still > _NUM_LOOKS

    async def run(self) -> None:
        """Until it is cancelled. Looks are counted and not seconds: a process that was stopped has not stood still."""
        while True:
            await asyncio.sleep(self._stall_bound_s / _NUM_LOOKS)
            was_stalled = self.is_stalled
            self._num_still = 0 if self._pulse.has_moved() else self._num_still + 1
            if self.is_stalled == was_stalled:
                continue
            if was_stalled:
                _log.warning("the engine moves again")
            else:
                _log.error("the engine has stood still for %g s", self._stall_bound_s)
            self._on_change()
