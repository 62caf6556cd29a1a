"""The engine loop without its thread: iterations are callbacks of the process that owns it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import Command
from simulation.kernel import Process, ProcessKilled


class SteppedEngine(EngineLoop):
    """An EngineLoop whose iterations are callbacks of a process and not of a thread. See `stepped_engine`."""

    # Set by the subclass that belongs to one process.
    process: Process
    _is_started = False
    _is_scheduled = False
    _is_broken = False

    def rests_until_s(self) -> float:
        """No iteration begins before."""
        return 0.0

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
            self.process.call_soon(self._run_iteration)

    def _run_iteration(self) -> None:
        until_s = self.rests_until_s()
        if until_s > self.process.world.now_s:
            self.process.call_at(until_s, self._run_iteration)
            return
        asyncio._set_running_loop(None)
        more = False
        try:
            if self._is_broken:
                while not self._inbox.empty():
                    self._refuse(self._inbox.get())
            else:
                more = self.run_once()
        except ProcessKilled:
            return
        except Exception as error:
            self._is_broken = True
            self._break_down(error)
        self._is_scheduled = False
        if more:
            self._schedule()


def stepped_engine(
    owner: Process, receive: Callable[[Command], Command], hangs_until_s: Callable[[], float]
) -> type[SteppedEngine]:
    """The engine of `owner`; `receive` sees every command in the order in which they come, and may put another in its
    place. Asked before each iteration, `hangs_until_s` says when there may be one.
    """

    class EngineOfProcess(SteppedEngine):
        process = owner

        def post(self, command: Command) -> None:
            super().post(receive(command))

        def rests_until_s(self) -> float:
            return hangs_until_s()

    return EngineOfProcess
