"""A client that leaves, or whose deadline passes, at any stage of a handoff leaves nothing behind on any node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import pytest
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import FakeMesh, FakeNode, until

PROMPT = list(range(40, 77))


@dataclass
class Stage:
    """How to bring a request to a stage and hold it there; `release` lets the nodes go on."""

    reached: Callable[[], bool]
    release: Callable[[], None]


def hold_queue(mesh: FakeMesh, prefill: FakeNode, decode: FakeNode) -> Stage:
    """The prompt waits: the prefill node is in the middle of a step for somebody else."""
    gate = Gate()
    prefill.executor.before_pass = gate.wait
    return Stage(lambda: gate.reached.is_set() and prefill.num_handoffs == 2, gate.open)


def hold_compute(mesh: FakeMesh, prefill: FakeNode, decode: FakeNode) -> Stage:
    """The second chunk is being computed; the grant is there and the first chunk was sent."""
    gate = Gate()
    engine = prefill.node.engine
    prefill.executor.before_pass = lambda plan: gate.wait() if engine.snapshot.num_steps >= 1 else None
    return Stage(lambda: gate.reached.is_set() and decode.node.engine.snapshot.active_lcm_blocks > 0, gate.open)


def hold_grant(mesh: FakeMesh, prefill: FakeNode, decode: FakeNode) -> Stage:
    """The prompt is computed, but the decode node is too busy to give it memory."""
    gate = Gate()
    decode.executor.before_pass = gate.wait
    return Stage(lambda: gate.reached.is_set() and prefill.node.engine.snapshot.num_steps >= 4, gate.open)


def hold_transfer(mesh: FakeMesh, prefill: FakeNode, decode: FakeNode) -> Stage:
    """Writes are posted and do not land."""
    mesh.fabric.hold(decode.endpoint)
    return Stage(
        lambda: mesh.fabric.num_unfinished_writes(decode.endpoint) > 0,
        lambda: mesh.fabric.release(decode.endpoint),
    )


def hold_decode(mesh: FakeMesh, prefill: FakeNode, decode: FakeNode) -> Stage:
    """Tokens are being generated."""
    gate = Gate()
    engine = decode.node.engine
    decode.executor.before_pass = lambda plan: gate.wait() if engine.snapshot.num_steps >= 3 else None
    return Stage(gate.reached.is_set, gate.open)


STAGES = [hold_queue, hold_compute, hold_grant, hold_transfer, hold_decode]


async def start_at(mesh: FakeMesh, hold: Callable, timeout: float) -> tuple[FakeNode, FakeNode, Stage, object, list]:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    # So that the watched connection is up before anything is held.
    await mesh.generate(decode, [1, 2], max_tokens=1, prefill_address=prefill.address)
    for node in (prefill, decode):
        node.node.engine._num_steps = 0
    others: list[Awaitable[object]] = []
    stage = hold(mesh, prefill, decode)
    if hold in (hold_queue, hold_grant):
        other = mesh.generate(decode, [5, 6, 7], max_tokens=3, prefill_address=prefill.address)
        others.append(asyncio.ensure_future(other))
        busy = prefill if hold is hold_queue else decode
        await until(busy.executor.before_pass.__self__.reached.is_set, "the other request keeps the node busy")
    call = mesh.call(decode, token_ids=PROMPT, max_tokens=30, prefill_address=prefill.address, timeout=timeout)
    reading = asyncio.ensure_future(drain(call))
    await until(stage.reached, hold.__name__)
    return prefill, decode, stage, call, [reading, *others]


async def drain(call) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    return await call.code()


async def assert_nothing_is_left(mesh: FakeMesh, prefill: FakeNode, decode: FakeNode) -> None:
    for node in (prefill, decode):
        node.executor.before_pass = lambda plan: None
        await node.assert_all_blocks_return()
    answer = await mesh.generate(decode, PROMPT, max_tokens=5, prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens(PROMPT, 5)


@pytest.mark.parametrize("hold", STAGES)
async def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(mesh: FakeMesh, hold: Callable) -> None:
    prefill, decode, stage, call, tasks = await start_at(mesh, hold, timeout=30.0)
    call.cancel()
    assert await tasks[0] == grpc.StatusCode.CANCELLED
    stage.release()
    await asyncio.gather(*tasks[1:])
    await assert_nothing_is_left(mesh, prefill, decode)


@pytest.mark.parametrize("hold", STAGES)
async def test_a_deadline_that_passes_at_any_stage_leaves_nothing_behind(mesh: FakeMesh, hold: Callable) -> None:
    prefill, decode, stage, _, tasks = await start_at(mesh, hold, timeout=1.0)
    assert await tasks[0] == grpc.StatusCode.DEADLINE_EXCEEDED
    stage.release()
    await asyncio.gather(*tasks[1:])
    await assert_nothing_is_left(mesh, prefill, decode)


async def test_granted_blocks_stay_quarantined_while_a_write_is_outstanding(mesh: FakeMesh) -> None:
    prefill, decode, stage, call, _ = await start_at(mesh, hold_transfer, timeout=30.0)
    call.cancel()
    engine = decode.node.engine
    await until(lambda: engine.snapshot.quarantined_lcm_blocks > 0, "the blocks are quarantined")
    assert prefill.node.engine.snapshot.active_lcm_blocks + prefill.node.engine.snapshot.quarantined_lcm_blocks > 0
    assert prefill.num_handoffs == decode.num_handoffs == 1
    stage.release()
    await assert_nothing_is_left(mesh, prefill, decode)


async def test_an_abort_stops_the_prefill_within_one_chunk(mesh: FakeMesh) -> None:
    prefill, decode, stage, call, _ = await start_at(mesh, hold_compute, timeout=30.0)
    call.cancel()
    await until(lambda: prefill.num_handoffs == 0, "the handoff is over on the prefill node")
    stage.release()
    await until(prefill.is_quiet, "the prefill node is quiet")
    assert prefill.node.engine.snapshot.num_steps == 2
    await assert_nothing_is_left(mesh, prefill, decode)


async def test_a_storm_of_cancelled_requests_leaves_nothing_behind(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    calls = [
        mesh.call(decode, token_ids=[*range(index % 30), 9], max_tokens=20, prefill_address=prefill.address)
        for index in range(40)
    ]
    readers = [asyncio.ensure_future(drain(call)) for call in calls]
    for index, call in enumerate(calls):
        if index % 3:
            await asyncio.sleep(0)
        call.cancel()
    await asyncio.gather(*readers)
    await assert_nothing_is_left(mesh, prefill, decode)
