"""Several samples of one request: exactly the tokens of as many requests, for little more than one prompt computed."""

from __future__ import annotations

import asyncio
import time

import pytest
from pdmesh.v1 import inference_pb2
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import FakeMesh, until
from support.fake_router import FakeRouter

PROMPT = list(range(40, 77))


async def _tokens_by_sample(call) -> tuple[dict[int, list[int]], list[inference_pb2.Finish]]:
    tokens: dict[int, list[int]] = {}
    finishes = []
    async for response in call:
        tokens.setdefault(response.index, []).extend(token.token_id for token in response.delta.tokens)
        if response.HasField("finish"):
            finishes.append(response.finish)
    return tokens, finishes


async def test_samples_are_exactly_what_requests_of_their_own_would_get_and_share_the_prompt(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = [await mesh.decode(prefill), await mesh.decode(prefill)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peer")
    async with FakeRouter(prefill=[prefill], decode=decode) as router:
        tokens, finishes = await _tokens_by_sample(router.call(PROMPT, seed=11, max_tokens=12, num_samples=4))
        num_computed = prefill.executor.num_input_tokens
        single = await router.generate(PROMPT, seed=13, max_tokens=12)
    assert tokens == {index: expected_tokens(PROMPT, 12, seed=11 + index) for index in range(4)}
    assert single.token_ids == tokens[2]
    # The first sample computed the prompt, the others the grain that is never taken from a cache.
    assert num_computed < len(PROMPT) + 4 * 4
    usages = [finish.usage for finish in finishes]
    assert sum(usage.prompt_tokens for usage in usages) == len(PROMPT)
    assert sum(usage.completion_tokens for usage in usages) == 4 * 12
    # What the later samples found cached was computed for this request.
    assert sum(usage.cached.prefill_device + usage.cached.decode_device for usage in usages) == 0
    for node in (prefill, *decode):
        await node.assert_all_blocks_return()


async def test_samples_go_on_when_their_decode_node_dies(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    max_tokens, room = 150, {"num_lcm_blocks": 200}
    decode = [await mesh.decode(prefill, **room), await mesh.decode(prefill, **room)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peer")
    async with FakeRouter(prefill=[prefill], decode=decode) as router:
        gate = Gate()
        # Slow enough for all samples to be under way before the first one ends, on a busy machine as well.
        for node in decode:
            node.executor.before_pass = lambda plan: gate.wait() if plan.num_rows == 3 else time.sleep(0.005)
        call = router.call(PROMPT, seed=1, max_tokens=max_tokens, num_samples=3)
        running = asyncio.ensure_future(_tokens_by_sample(call))
        await until(gate.reached.is_set, "all samples run on one node")
        dying, living = sorted(decode, key=lambda node: -node.node.engine.snapshot.num_running)
        living.executor.before_pass = lambda plan: None
        killing = asyncio.ensure_future(mesh.kill(dying))
        tokens, finishes = await running
        gate.open()
        await killing
    assert tokens == {index: expected_tokens(PROMPT, max_tokens, seed=1 + index) for index in range(3)}
    assert sum(finish.num_replacements for finish in finishes) == 3
    for node in (prefill, living):
        await node.assert_all_blocks_return()


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_client_that_leaves_takes_all_samples_with_it(mesh: FakeMesh, where: str) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    await until(lambda: decode.node.is_ready, "the decode node has its peer")
    async with FakeRouter(prefill=[prefill], decode=[decode]) as router:
        gate = Gate()
        {"prefill": prefill, "decode": decode}[where].executor.before_pass = gate.wait
        call = router.call(PROMPT, max_tokens=20, num_samples=4)
        reading = asyncio.ensure_future(_tokens_by_sample(call))
        await until(gate.reached.is_set, "it is under way")
        call.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await reading
        for node in (prefill, decode):
            node.executor.before_pass = lambda plan: None
            await node.assert_all_blocks_return()
        assert (await router.status()).num_running_requests == 0
