"""A decode node without memory holds up a bounded number of prompts for a bounded time."""

from __future__ import annotations

import asyncio

import grpc
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import Answer, FakeMesh, FakeNode, until
from support.fake_router import FakeRouter

from node_runtime.errors import PrefillFailed
from node_runtime.rpc import error_from_rpc


async def busy_pair(mesh: FakeMesh, **config: object) -> tuple[FakeNode, FakeNode, Gate, asyncio.Task[Answer]]:
    """A decode node that is in the middle of a step, so that it gives no memory to anybody until the gate opens."""
    prefill = await mesh.prefill(max_ready_ungranted=2, config={"max_waiting_requests": 2, **config})
    decode = await mesh.decode(prefill)
    gate = Gate()
    decode.executor.before_pass = gate.wait
    first = asyncio.ensure_future(mesh.generate(decode, [1, 2, 3], prefill_address=prefill.address))
    await until(gate.reached.is_set, "the decode node is busy")
    await until(prefill.is_quiet, "the prefill node has handed over")
    return prefill, decode, gate, first


async def test_beyond_the_bound_of_ready_prompts_nothing_is_computed_and_beyond_the_queue_all_is_refused(
    mesh: FakeMesh,
) -> None:
    prefill, decode, gate, first = await busy_pair(mesh)
    prompts = [[7, 8, index] for index in range(4)]
    computed = prefill.executor.num_input_tokens

    calls = [asyncio.ensure_future(mesh.generate(decode, prompts[0], prefill_address=prefill.address))]
    for num_ready, prompt in enumerate(prompts[1:], start=1):
        await until(lambda num=num_ready: prefill.num_handoffs == num, "the last one has arrived")
        calls.append(asyncio.ensure_future(mesh.generate(decode, prompt, prefill_address=prefill.address)))
    await until(lambda: prefill.num_handoffs == 4, "all have arrived")
    await until(lambda: prefill.executor.num_input_tokens == computed + 6, "two are computed")
    code, message = await mesh.error(decode, [9, 9], prefill_address=prefill.address)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_waiting_requests=2" in message
    assert prefill.executor.num_input_tokens == computed + 6
    gate.open()
    decode.executor.before_pass = lambda plan: None
    assert (await first).token_ids == expected_tokens([1, 2, 3], 4)
    for prompt, call in zip(prompts, calls, strict=True):
        assert (await call).token_ids == expected_tokens(prompt, 4)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_decode_node_without_memory_holds_up_the_prompts_of_others_for_a_bounded_time(mesh: FakeMesh) -> None:
    prefill, decode, gate, first = await busy_pair(mesh, grant_timeout_s=0.5)
    other = await mesh.decode(prefill)
    stuck = [
        asyncio.ensure_future(mesh.failure(decode, [7, 8, index], prefill_address=prefill.address))
        for index in range(2)
    ]
    await until(lambda: prefill.num_handoffs == 2, "two prompts are ready")
    answer = await mesh.generate(other, [4, 5, 6], prefill_address=prefill.address)
    assert answer.token_ids == expected_tokens([4, 5, 6], 4)
    for error in await asyncio.gather(*stuck):
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no memory for the prompt within 0.5 s" in (error.details() or "")
        # The decode node is to blame: on another one the same prefill node may serve the prompt.
        cause = error_from_rpc(error, decode.address)
        assert not isinstance(cause, PrefillFailed)
        assert cause.retry_after_s is not None
    gate.open()
    decode.executor.before_pass = lambda plan: None
    assert (await first).token_ids == expected_tokens([1, 2, 3], 4)
    for node in (prefill, decode, other):
        await node.assert_all_blocks_return()


async def test_a_prompt_that_one_decode_node_has_no_memory_for_is_served_by_another_with_the_same_prefill_node(
    mesh: FakeMesh,
) -> None:
    prefill, decode, gate, first = await busy_pair(mesh, grant_timeout_s=0.5)
    other = await mesh.decode(prefill)
    await until(lambda: other.node.is_ready, "the other decode node has its peer")
    async with FakeRouter(prefill=[prefill], decode=[decode, other]) as router:
        answers = await asyncio.gather(*(router.generate([7, 8, index], max_tokens=3) for index in range(2)))
    for index, answer in enumerate(answers):
        assert answer.token_ids == expected_tokens([7, 8, index], 3)
    assert sum(answer.finish.num_replacements for answer in answers) >= 1
    gate.open()
    decode.executor.before_pass = lambda plan: None
    assert (await first).token_ids == expected_tokens([1, 2, 3], 4)
    for node in (prefill, decode, other):
        await node.assert_all_blocks_return()
