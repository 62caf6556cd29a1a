"""Whether this node's engine gets anywhere: what tells a request that waits from one that hangs.

An engine that computes moves by itself, an idle one when it is asked to. Belongs to one request and its event loop; it
knows neither the wire nor the request.
"""

from __future__ import annotations

from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import Invoke


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
            self._engine.post(Invoke(action=_do_nothing))
        return has_moved


def _do_nothing() -> None:
    return
