"""Nodes that die, refuse or lose a transfer under a real router: clients get the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import FakeMesh, FakeNode, until
from support.fake_router import FakeRouter, RoutedAnswer

from node_runtime.errors import PrefillFailed
from node_runtime.rpc import error_from_rpc

PROMPT = list(range(40, 77))


async def _pair_of_each(mesh: FakeMesh) -> tuple[list[FakeNode], list[FakeNode]]:
    prefill = [await mesh.prefill(), await mesh.prefill()]
    decode = [await mesh.decode(*prefill), await mesh.decode(*prefill)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peers")
    return prefill, decode


async def _once_it_serves_again(router: FakeRouter) -> RoutedAnswer:
    """The answer of a mesh that has to find its nodes well again first."""
    for _ in range(200):
        try:
            return await router.generate(PROMPT)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.05)
    raise AssertionError("the mesh never served again")


async def test_a_decode_node_that_dies_mid_stream_leaves_no_seam(mesh: FakeMesh) -> None:
    prefill, decode = await _pair_of_each(mesh)
    async with FakeRouter(prefill=prefill, decode=decode) as router:
        gate = Gate()
        engines = [node.node.engine for node in decode]
        # Whichever node takes the request: nothing more comes from it then.
        for node in decode:
            node.executor.before_pass = lambda plan: (
                gate.wait() if max(engine.snapshot.num_steps for engine in engines) >= 10 else None
            )
        stream, answer = aiter(router.call(PROMPT, seed=5, max_tokens=30)), RoutedAnswer()
        while len(answer.token_ids) < 7:
            answer.take(await anext(stream))
        await until(gate.reached.is_set, "the decode node stands still")
        dying, living = sorted(decode, key=lambda node: -node.node.engine.snapshot.num_running)
        assert dying.node.engine.snapshot.num_running == 1
        living.executor.before_pass = lambda plan: None
        killing = asyncio.ensure_future(mesh.kill(dying))
        async for response in stream:
            answer.take(response)
        gate.open()
        await killing
    assert answer.token_ids == expected_tokens(PROMPT, 30, seed=5)
    assert answer.kinds.count("placement") == answer.kinds.count("finish") == 1
    assert answer.finish is not None
    assert answer.finish.num_replacements == 1
    assert (answer.finish.usage.prompt_tokens, answer.finish.usage.completion_tokens) == (len(PROMPT), 30)
    for node in (*prefill, living):
        await node.assert_all_blocks_return()


async def test_several_streams_of_one_dead_node_all_go_on(mesh: FakeMesh) -> None:
    prefill, decode = await _pair_of_each(mesh)
    prompts = [[*PROMPT, index] for index in range(6)]
    async with FakeRouter(prefill=prefill, decode=decode) as router:
        gate = Gate()
        engine = decode[0].node.engine
        decode[0].executor.before_pass = lambda plan: gate.wait() if engine.snapshot.num_running >= 2 else None
        running = [asyncio.ensure_future(router.generate(prompt, max_tokens=40)) for prompt in prompts]
        await until(gate.reached.is_set, "the first decode node stands still")
        killing = asyncio.ensure_future(mesh.kill(decode[0]))
        answers = await asyncio.gather(*running)
        gate.open()
        await killing
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected_tokens(prompt, 40)
        assert answer.text != ""
    assert sum(answer.finish.num_replacements for answer in answers) >= 2
    for node in (*prefill, decode[1]):
        await node.assert_all_blocks_return()


async def test_a_prefill_node_that_dies_before_it_is_done_costs_no_token(mesh: FakeMesh) -> None:
    prefill, decode = await _pair_of_each(mesh)
    async with FakeRouter(prefill=prefill, decode=decode) as router:
        gate = Gate()
        prefill[0].executor.before_pass = gate.wait
        running = [asyncio.ensure_future(router.generate([*PROMPT, index], max_tokens=9)) for index in range(4)]
        await until(lambda: prefill[0].num_handoffs == 2, "two prompts are being prefilled on the first node")
        killing = asyncio.ensure_future(mesh.kill(prefill[0]))
        answers = await asyncio.gather(*running)
        gate.open()
        await killing
    for index, answer in enumerate(answers):
        assert answer.token_ids == expected_tokens([*PROMPT, index], 9)
    assert sum(answer.finish.num_replacements for answer in answers) == 2
    for node in (prefill[1], *decode):
        await node.assert_all_blocks_return()


@pytest.mark.parametrize("num_runs", [0, 3])
async def test_a_transfer_that_fails_is_done_again(mesh: FakeMesh, num_runs: int) -> None:
    prefill, decode = await _pair_of_each(mesh)
    async with FakeRouter(prefill=prefill, decode=decode) as router:
        for _ in range(4):
            await router.generate([1, 2], max_tokens=1)
        # Whatever is written to the first decode node fails: two prefill nodes fail with it, then it is left alone.
        mesh.fabric.fail_after(decode[0].endpoint, num_runs)
        answers = [await router.generate([*PROMPT, index], max_tokens=9) for index in range(3)]
        mesh.fabric.fail_after(decode[0].endpoint, None)
    for index, answer in enumerate(answers):
        assert answer.token_ids == expected_tokens([*PROMPT, index], 9)
    assert sum(answer.finish.num_replacements for answer in answers) >= 2
    for node in (*prefill, *decode):
        await node.assert_all_blocks_return()


async def test_a_cache_that_arrives_damaged_is_sent_again_before_the_client_sees_a_token_of_it(mesh: FakeMesh) -> None:
    prefill = [await mesh.prefill(), await mesh.prefill()]
    decode = await mesh.decode(*prefill, config={"verify_transfers": "all"})
    await until(lambda: decode.node.is_ready, "the decode node has its peers")
    async with FakeRouter(prefill=prefill, decode=[decode]) as router:
        for _ in range(2):
            await router.generate([1, 2], max_tokens=1)
        mesh.fabric.flip_bit(decode.endpoint, 0)
        answer = await router.generate(PROMPT, max_tokens=9)
    assert answer.token_ids == expected_tokens(PROMPT, 9)
    assert answer.finish is not None
    assert answer.finish.num_replacements == 1
    assert (await mesh.status(decode)).num_damaged_handoffs == 1
    for node in (*prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_draining_node_and_a_full_one_are_passed_by(mesh: FakeMesh) -> None:
    prefill = [await mesh.prefill(), await mesh.prefill(config={"max_waiting_requests": 1})]
    decode = [await mesh.decode(*prefill), await mesh.decode(*prefill)]
    await until(lambda: all(node.node.is_ready for node in decode), "the decode nodes have their peers")
    async with FakeRouter(prefill=prefill, decode=decode) as router:
        await router.generate([1, 2], max_tokens=1)
        stopping = asyncio.ensure_future(decode[0].node.stop())
        answers = await asyncio.gather(*(router.generate([*PROMPT, index], max_tokens=9) for index in range(6)))
        await stopping
    for index, answer in enumerate(answers):
        assert answer.token_ids == expected_tokens([*PROMPT, index], 9)
    for node in (*prefill, decode[1]):
        await node.assert_all_blocks_return()


async def test_a_burst_beyond_every_queue_is_shed_with_a_hint_and_the_rest_is_served_in_time(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill(config={"max_waiting_requests": 2})
    decode = await mesh.decode(prefill, config={"max_waiting_requests": 8})
    await until(lambda: decode.node.is_ready, "the decode node has its peer")
    gate = Gate()

    async def ask(router: FakeRouter, index: int) -> RoutedAnswer | grpc.aio.AioRpcError:
        try:
            return await router.generate([*PROMPT, index], timeout=15.0)
        except grpc.aio.AioRpcError as error:
            return error

    async with FakeRouter(prefill=[prefill], decode=[decode], max_live_requests=16) as router:
        await router.generate([1, 2], max_tokens=1)
        prefill.executor.before_pass = gate.wait
        asking = [asyncio.ensure_future(ask(router, index)) for index in range(30)]
        await until(lambda: sum(each.done() for each in asking) >= 14, "what fits no queue is refused at once")
        gate.open()
        outcomes = await asyncio.gather(*asking)
    served = [(index, each) for index, each in enumerate(outcomes) if isinstance(each, RoutedAnswer)]
    refused = [each for each in outcomes if isinstance(each, grpc.aio.AioRpcError)]
    assert served
    for index, answer in served:
        assert answer.token_ids == expected_tokens([*PROMPT, index], 4)
    for error in refused:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "grpc-status-details-bin" in dict(error.trailing_metadata() or ())
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_with_no_other_node_the_client_hears_which_one_failed(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    await until(lambda: decode.node.is_ready, "the decode node has its peer")
    async with FakeRouter(prefill=[prefill], decode=[decode], poll_interval_s=0.05, max_attempts=2) as router:
        mesh.fabric.fail_after(decode.endpoint, 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(PROMPT)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert prefill.address in (caught.value.details() or "")
        mesh.fabric.fail_after(decode.endpoint, None)
        assert (await _once_it_serves_again(router)).token_ids == expected_tokens(PROMPT, 4)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


@pytest.mark.parametrize(("where", "blamed"), [("prefill", True), ("decode", False)])
async def test_a_decode_node_blames_the_prefill_node_for_nothing_but_its_faults(
    mesh: FakeMesh, where: str, blamed: bool
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)

    def break_down(stage: int) -> None:
        raise RuntimeError("secret of the kernel")

    {"prefill": prefill, "decode": decode}[where].executor.before_stage = break_down
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.generate(decode, PROMPT, prefill_address=prefill.address)
    error = error_from_rpc(caught.value, decode.address)
    assert isinstance(error, PrefillFailed) is blamed
    if isinstance(error, PrefillFailed):
        assert error.address == prefill.address


@pytest.mark.parametrize("num_sent", [1, 4, 11])
async def test_a_decode_node_goes_on_behind_output_it_did_not_generate(mesh: FakeMesh, num_sent: int) -> None:
    prefill = await mesh.prefill()
    decode, fused = await mesh.decode(prefill), await mesh.fused()
    whole = expected_tokens(PROMPT, 20, seed=3)
    resumed = {"num_output_tokens": num_sent, "max_tokens": 20 - num_sent}
    for node, fields in ((decode, {"prefill_address": prefill.address}), (fused, {})):
        # A prompt that is cached, its own output included.
        for _ in range(2):
            answer = await mesh.generate(node, [*PROMPT, *whole[:num_sent]], **resumed, **fields, sampling={"seed": 3})
            assert answer.token_ids == whole[num_sent:]
            assert answer.finish is not None
            usage = answer.finish.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 20)
            cached = usage.cached
            assert cached.decode_device + cached.prefill_device <= len(PROMPT)
    for node in (prefill, decode, fused):
        await node.assert_all_blocks_return()
