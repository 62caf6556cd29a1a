"""Nodes that hang behind a connection that lives, and nodes that are merely slow, under a real router."""

from __future__ import annotations

import asyncio

import grpc
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import FakeMesh, until
from support.fake_router import FakeRouter, RoutedAnswer

PROMPT = list(range(40, 77))
SILENCE_S = 1.0


async def test_a_decode_node_whose_engine_hangs_mid_stream_leaves_no_seam(mesh: FakeMesh) -> None:
    prefill = [await mesh.prefill(), await mesh.prefill()]
    decode = [await mesh.decode(*prefill), await mesh.decode(*prefill)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peers")
    async with FakeRouter(prefill=prefill, decode=decode, silence_timeout_s=SILENCE_S) as router:
        gate = Gate()
        engines = [node.node.engine for node in decode]
        for node in decode:
            node.executor.before_pass = lambda plan: (
                gate.wait() if max(engine.snapshot.num_steps for engine in engines) >= 10 else None
            )
        stream, answer = aiter(router.call(PROMPT, seed=5, max_tokens=30)), RoutedAnswer()
        while len(answer.token_ids) < 7:
            answer.take(await anext(stream))
        await until(gate.reached.is_set, "the decode node stands still")
        hanging, living = sorted(decode, key=lambda node: -node.node.engine.snapshot.num_running)
        living.executor.before_pass = lambda plan: None
        async for response in stream:
            answer.take(response)
        # It never came back on its own, and its event loop answered all the time.
        assert hanging.node.engine.snapshot.num_running == 1
        assert (await mesh.status(hanging)).num_steps >= 10
        gate.open()
    assert answer.token_ids == expected_tokens(PROMPT, 30, seed=5)
    assert answer.finish is not None
    assert answer.finish.num_replacements >= 1
    assert (answer.finish.usage.prompt_tokens, answer.finish.usage.completion_tokens) == (len(PROMPT), 30)
    for node in (*prefill, *decode):
        await node.assert_all_blocks_return()


async def test_a_prompt_that_queues_for_longer_than_a_silence_is_not_taken_for_lost(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = [await mesh.decode(prefill), await mesh.decode(prefill)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peer")
    async with FakeRouter(prefill=[prefill], decode=decode, silence_timeout_s=SILENCE_S) as router:
        gate = Gate()
        prefill.executor.before_pass = gate.wait
        running = asyncio.ensure_future(router.generate(PROMPT, max_tokens=9))
        await until(gate.reached.is_set, "the prompt is on the prefill node")
        done, _ = await asyncio.wait((running,), timeout=2.5 * SILENCE_S)
        assert not done
        gate.open()
        answer = await running
    assert answer.token_ids == expected_tokens(PROMPT, 9)
    assert answer.finish is not None
    assert answer.finish.num_replacements == 0


async def test_a_hedge_gives_the_same_tokens_and_the_slow_attempt_leaves_nothing_behind(mesh: FakeMesh) -> None:
    prefill = [await mesh.prefill(), await mesh.prefill()]
    decode = [await mesh.decode(*prefill), await mesh.decode(*prefill)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peers")
    async with FakeRouter(prefill=prefill, decode=decode, hedge_after_s=0.2) as router:
        gate = Gate()
        for node in prefill:
            # Whichever comes first stands still.
            node.executor.before_pass = lambda plan: None if gate.reached.is_set() else gate.wait()
        answer = await router.generate(PROMPT, seed=3, max_tokens=20)
        gate.open()
    assert answer.token_ids == expected_tokens(PROMPT, 20, seed=3)
    assert answer.kinds.count("placement") == answer.kinds.count("finish") == 1
    assert answer.finish is not None
    assert answer.finish.num_replacements == 0
    usage = answer.finish.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 20)
    assert usage.cached.prefill_device == usage.cached.decode_device == 0
    for node in (*prefill, *decode):
        await node.assert_all_blocks_return()


async def test_a_storm_of_slow_requests_is_not_doubled_by_its_hedges(mesh: FakeMesh) -> None:
    prefill = [await mesh.prefill(), await mesh.prefill()]
    decode = [await mesh.decode(*prefill), await mesh.decode(*prefill)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peers")
    settings = {"hedge_after_s": 0.1, "retry_burst": 2, "retry_ratio": 0.0}
    async with FakeRouter(prefill=prefill, decode=decode, **settings) as router:
        gate = Gate()
        for node in prefill:
            node.executor.before_pass = gate.wait
        running = [asyncio.ensure_future(router.generate([*PROMPT, index], max_tokens=5)) for index in range(6)]
        # Six requests and the two hedges that the budget pays for, however long the others wait.
        await until(lambda: sum(node.num_handoffs for node in prefill) == 8, "the hedges are under way")
        await asyncio.wait(running, timeout=0.5)
        assert sum(node.num_handoffs for node in prefill) == 8
        gate.open()
        answers = await asyncio.gather(*running)
    for index, answer in enumerate(answers):
        assert answer.token_ids == expected_tokens([*PROMPT, index], 5)
    for node in (*prefill, *decode):
        await node.assert_all_blocks_return()


async def test_a_node_whose_engine_stands_still_says_so_and_takes_nothing_new_until_it_moves(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    mesh.stall_bound_s = 1.0
    decode = await mesh.decode(prefill)
    await until(lambda: decode.node.is_ready, "the decode node has its peer")
    gate = Gate()
    decode.executor.before_pass = gate.wait
    running = asyncio.ensure_future(mesh.generate(decode, PROMPT, max_tokens=9, prefill_address=prefill.address))
    await until(gate.reached.is_set, "the engine stands still")
    await until(lambda: not decode.node.is_ready, "the node has noticed")
    assert not (await mesh.status(decode)).serving
    code, message = await mesh.error(decode, PROMPT, prefill_address=prefill.address)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "stands still" in message
    gate.open()
    assert (await running).token_ids == expected_tokens(PROMPT, 9)
    await until(lambda: decode.node.is_ready, "it serves again")
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_prompts_that_queue_at_a_prefill_node_that_stands_still_are_computed_by_another(mesh: FakeMesh) -> None:
    patient, mesh.stall_bound_s = mesh.stall_bound_s, 1.0
    prefill = [await mesh.prefill()]
    mesh.stall_bound_s = patient
    prefill.append(await mesh.prefill())
    decode = await mesh.decode(*prefill)
    await until(lambda: all(peer.state == "ready" for peer in decode.node._receiving.peers.statuses()), "all are peers")
    async with FakeRouter(prefill=prefill, decode=[decode]) as router:
        gate = Gate()
        prefill[0].executor.before_pass = gate.wait
        running = [asyncio.ensure_future(router.generate([*PROMPT, index], max_tokens=9)) for index in range(4)]
        answers = await asyncio.gather(*running)
        # What was promised there is given up, and nothing new is taken.
        assert prefill[0].num_handoffs == 0
        assert not (await mesh.status(prefill[0])).serving
        gate.open()
    for index, answer in enumerate(answers):
        assert answer.token_ids == expected_tokens([*PROMPT, index], 9)
    assert sum(answer.finish.num_replacements for answer in answers) >= 1
    for node in (*prefill, decode):
        await node.assert_all_blocks_return()
