"""A busy engine is alive, an idle one too; one that hangs in a step is not until it goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from support.fake_compute import fake_core
from support.processes import wait_until

from node_runtime.clock import ManualClock, SystemClock
from node_runtime.engine.delivery import deliver_now
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import Invoke
from node_runtime.engine.progress import watch_progress
from scheduler_core import Role


class Engine:
    """Is busy since whenever the test says, and counts how often it is asked."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        self.num_looks = 0

    @property
    def busy_since_s(self) -> float | None:
        self.num_looks += 1
        return self.since_s


@asynccontextmanager
async def _watched(engine: Engine, clock: ManualClock) -> AsyncIterator[asyncio.Queue[bool]]:
    told: asyncio.Queue[bool] = asyncio.Queue()
    # Looks every 12.5 ms of real time, at a clock that the test moves.
    watching = asyncio.create_task(watch_progress(engine, clock, stall_timeout_s=0.05, set_alive=told.put_nowait))
    yield told
    watching.cancel()


async def test_an_engine_that_hangs_is_reported_once_and_so_is_its_return() -> None:
    engine, clock = Engine(), ManualClock(now_s=100)
    async with _watched(engine, clock) as told:
        engine.since_s = 100.0
        clock.advance(0.051)
        assert await asyncio.wait_for(told.get(), 30) is False
        engine.since_s = clock.now_s()
        assert await asyncio.wait_for(told.get(), 30) is True
        assert told.empty()


async def test_an_engine_with_nothing_to_do_is_alive_for_ever() -> None:
    engine, clock = Engine(), ManualClock(now_s=100)
    async with _watched(engine, clock) as told:
        clock.advance(1e6)
        num_looks = engine.num_looks
        while engine.num_looks < num_looks + 3:
            await asyncio.sleep(0.01)
        assert told.empty()


@contextmanager
def _running_loop() -> Iterator[EngineLoop]:
    core = fake_core(Role.FUSED)
    loop = EngineLoop(
        core.scheduler,
        core.executor,
        group_ids=core.group_ids,
        clock=SystemClock(),
        deliver=deliver_now,
        on_fatal=lambda error: None,
    )
    loop.start()
    yield loop
    loop.stop()


def test_the_loop_says_since_when_it_is_busy_and_that_it_sleeps() -> None:
    may_go_on = threading.Event()
    with _running_loop() as loop:
        wait_until(lambda: loop.busy_since_s is None, 30, "the engine to sleep")
        loop.post(Invoke(action=may_go_on.wait))
        wait_until(lambda: loop.busy_since_s is not None, 30, "the engine to be busy")
        may_go_on.set()
        wait_until(lambda: loop.busy_since_s is None, 30, "the engine to sleep again")
