"""Virtual time and processes."""

from __future__ import annotations

import asyncio

import pytest

from simulation.kernel import Livelock, Process, World


@pytest.fixture
def world() -> World:
    return World()


def process_of(world: World, errors: list[str] | None = None) -> Process:
    return Process(world, "p", lambda message, error: (errors if errors is not None else []).append(f"{error!r}"))


def test_time_jumps_to_the_next_timer(world: World) -> None:
    seen: list[float] = []

    async def sleep() -> None:
        await asyncio.sleep(1000.0)
        seen.append(asyncio.get_running_loop().time())

    process_of(world).create_task(sleep())
    world.run_until(2000.0)
    assert seen == [1000.0]
    assert world.now_s == 2000.0


def test_timeouts_and_cancellation_work_as_in_asyncio(world: World) -> None:
    seen: list[str] = []

    async def wait() -> None:
        try:
            async with asyncio.timeout(3.0):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append(f"timed out at {asyncio.get_running_loop().time()}")

    process_of(world).create_task(wait())
    world.run_until(10.0)
    assert seen == ["timed out at 3.0"]


def test_a_killed_process_does_not_even_run_its_finally_blocks(world: World) -> None:
    seen: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(5.0)
        finally:
            seen.append("finally")

    process = process_of(world)
    process.create_task(wait())
    world.run_until(1.0)
    process.kill()
    world.run_until(10.0)
    assert seen == []
    process.close_tasks()
    assert seen == ["finally"]


def test_a_stopped_process_catches_up_when_it_goes_on(world: World) -> None:
    seen: list[float] = []
    process = process_of(world)
    process.call_at(1.0, lambda: seen.append(world.now_s))
    process.call_at(2.0, lambda: seen.append(world.now_s))
    process.stop_running()
    world.run_until(5.0)
    assert seen == []
    process.resume()
    world.run_until(6.0)
    assert seen == [5.0, 5.0]


def test_a_callback_can_let_the_rest_of_the_world_go_on(world: World) -> None:
    seen: list[str] = []
    one, other = process_of(world), process_of(world)

    def compute() -> None:
        seen.append("begins")
        world.run_until(2.0)
        seen.append("ends")

    one.call_at(1.0, compute)
    other.call_at(1.5, lambda: seen.append("meanwhile"))
    world.run_until(3.0)
    assert seen == ["begins", "meanwhile", "ends"]


def test_whoever_lets_the_world_go_on_goes_on_in_time_though_another_does_so_without_end(world: World) -> None:
    """Otherwise a node that computes one pass after the other would hold up the pass of another one."""
    seen: list[float] = []
    one, other = process_of(world), process_of(world)

    def compute_for_ever() -> None:
        world.run_until(world.now_s + 0.3)
        other.call_soon(compute_for_ever)

    def compute() -> None:
        other.call_soon(compute_for_ever)
        world.run_until(2.0)
        seen.append(world.now_s)

    one.call_at(1.0, compute)
    world.run_until(10.0)
    assert seen == [pytest.approx(2.0, abs=0.3)]


def test_a_condition_is_seen_though_callbacks_go_on_without_end(world: World) -> None:
    process, seen = process_of(world), []

    def compute_for_ever() -> None:
        world.run_until(world.now_s + 0.25)
        seen.append(world.now_s)
        process.call_soon(compute_for_ever)

    process.call_soon(compute_for_ever)
    world.run_until(10.0, lambda: len(seen) == 3)
    assert world.now_s == 0.75


def test_what_a_thread_would_do_is_done_in_the_loop(world: World) -> None:
    seen: list[int] = []

    async def compute() -> None:
        seen.append(await asyncio.to_thread(lambda: 42))

    process_of(world).create_task(compute())
    world.run_until(1.0)
    assert seen == [42]


def test_an_exception_that_nobody_handles_is_reported(world: World) -> None:
    errors: list[str] = []

    def fail() -> None:
        raise ValueError("lost")

    process_of(world, errors).call_soon(fail)
    world.run_until(1.0)
    assert errors == ["ValueError('lost')"]


def test_a_process_that_never_waits_is_found(world: World) -> None:
    process = process_of(world)

    def spin() -> None:
        process.call_soon(spin)

    process.call_soon(spin)
    with pytest.raises(Livelock, match="p is busy"):
        world.run_until(1.0)
