"""An engine that hangs is told from one that works and from one that has nothing to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import Invoke
from node_runtime.engine.pulse import EnginePulse, EngineWatch


class ScriptedEngine:
    """Takes what is posted when it is told to."""

    def __init__(self) -> None:
        self.num_pulses = 0
        self.posted: list[Invoke] = []
        self.is_prompt = False

    def post(self, command: Invoke) -> None:
        self.posted.append(command)
        if self.is_prompt:
            self.take_all()

    def take_all(self) -> None:
        self.num_pulses += len(self.posted)
        self.posted.clear()


def _engine() -> tuple[ScriptedEngine, EngineLoop]:
    engine = ScriptedEngine()
    return engine, cast("EngineLoop", engine)


def test_an_idle_engine_moves_when_it_is_asked_and_one_that_hangs_is_asked_once() -> None:
    engine, loop = _engine()
    pulse = EnginePulse(loop)
    # Not known yet: it is asked.
    assert not pulse.has_moved()
    engine.take_all()
    assert pulse.has_moved()
    for _ in range(5):
        assert not pulse.has_moved()
    assert len(engine.posted) == 1
    engine.take_all()
    assert pulse.has_moved()


def test_an_engine_that_computes_moves_by_itself() -> None:
    engine, loop = _engine()
    pulse = EnginePulse(loop)
    for _ in range(3):
        engine.num_pulses += 1
        assert pulse.has_moved()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_standstill_is_told_once_and_so_is_its_end() -> None:
    engine, loop = _engine()
    changes: list[bool] = []
    watch = EngineWatch(loop, on_change=lambda: changes.append(watch.is_stalled), stall_bound_s=0.05)
    running = asyncio.create_task(watch.run())
    await _until(lambda: changes == [True])
    engine.is_prompt = True
    engine.take_all()
    await _until(lambda: changes == [True, False])
    # It answers, so it does not stand still, however long it has nothing to do.
    pulses = engine.num_pulses
    await _until(lambda: engine.num_pulses > pulses + 20)
    assert changes == [True, False]
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
