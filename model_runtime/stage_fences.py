"""StageFences: from work that a device was given to work it has done, stage by stage.

A forward issues its work without waiting for it. Whoever sends a stage's rows away must not read them before the device
has written them. Knows no model and no transfer; one forward owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cache_runtime.device import Device, Event


class StageFences:
    """Calls `on_stage` for every stored stage, in the order in which they were stored, once its rows are in memory.

    Nothing here blocks before `finish`: a stage is passed on when a later one is stored and its event is done. On the
    CPU every event is done at once.
    """

    def __init__(self, device: Device, on_stage: Callable[[int], None]) -> None:
        self._device = device
        self._on_stage = on_stage
        self._pending: deque[tuple[int, Event]] = deque()

    def stored(self, stage: int) -> None:
        """The work that writes the rows of `stage` has been issued to the current stream."""
        self._pending.append((stage, self._device.current_stream().record_event()))
        while self._pending and self._pending[0][1].is_done():
            self._pass_on()

    def finish(self) -> None:
        """Waits for the stages that are left and passes them on."""
        while self._pending:
            self._pending[0][1].synchronize()
            self._pass_on()

    def _pass_on(self) -> None:
        stage, _ = self._pending.popleft()
        self._on_stage(stage)
