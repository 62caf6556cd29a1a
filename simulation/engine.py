"""The engine loop without its thread: iterations are callbacks of the process that owns it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import Command
from simulation.kernel import Process, ProcessKilled


def stepped_engine(process: Process, on_fatal: Callable[[BaseException], None]) -> type[EngineLoop]:
    """An EngineLoop whose iterations are callbacks of `process` and not of a thread."""

    class SteppedEngine(EngineLoop):
        _is_started = False
        _is_scheduled = False

        def start(self) -> None:
            self._is_started = True
            self._schedule()

        def stop(self, timeout_s: float = 10.0) -> None:
            del timeout_s
            self._is_started = False

        def post(self, command: Command) -> None:
            super().post(command)
            self._schedule()

        def _schedule(self) -> None:
            if self._is_started and not self._is_scheduled:
                self._is_scheduled = True
                process.call_soon(self._iterate)

        def _iterate(self) -> None:
            asyncio._set_running_loop(None)
            try:
                more = self.run_once()
            except ProcessKilled:
                return
            except Exception as error:
                self._is_started = False
                on_fatal(error)
                return
            self._is_scheduled = False
            if more:
                self._schedule()

    return SteppedEngine
