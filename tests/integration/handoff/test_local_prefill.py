"""A decode node that computes prompts itself: the same tokens as with a handoff or on a fused node."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.fake_compute import Gate, expected_tokens
from support.fake_mesh import FakeMesh, FakeNode, until
from support.fake_router import FakeRouter

from node_runtime.rpc import Telemetry

PROMPT = list(range(40, 77))
FALLBACK = {"local_prefill": "fallback"}


async def _num_local(mesh: FakeMesh, node: FakeNode) -> int:
    return (await mesh.status(node)).num_local_prefills


@pytest.mark.parametrize("length", [1, 3, 4, 5, 37, 120])
async def test_local_remote_and_fused_tokens_are_the_same(mesh: FakeMesh, length: int) -> None:
    prompt = [100 + 7 * index for index in range(length)]
    prefill = await mesh.prefill()
    decode, fused = await mesh.decode(config=FALLBACK), await mesh.fused()
    remote = await mesh.generate(decode, prompt, max_tokens=12, prefill_address=prefill.address, extra_keys=[b"remote"])
    assert await _num_local(mesh, decode) == 0
    local = await mesh.generate(decode, prompt, max_tokens=12)
    assert await _num_local(mesh, decode) == 1
    alone = await mesh.generate(fused, prompt, max_tokens=12)
    assert local.token_ids == remote.token_ids == alone.token_ids == expected_tokens(prompt, 12)
    assert local.kinds[0] == "admitted"
    assert local.finish is not None
    assert (local.finish.usage.prompt_tokens, local.finish.usage.completion_tokens) == (length, 12)
    assert local.finish.timings.transferred_bytes == 0
    for node in (prefill, decode, fused):
        await node.assert_all_blocks_return()


async def test_what_was_computed_locally_is_hit_by_the_next_handoff_and_the_other_way_round(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(config=FALLBACK)
    await mesh.generate(decode, PROMPT)
    remote = await mesh.generate(decode, [*PROMPT, 1, 2], prefill_address=prefill.address)
    assert remote.finish is not None
    assert remote.finish.usage.cached.decode_device == 36
    local = await mesh.generate(decode, [*PROMPT, 1, 2, 3])
    assert local.finish is not None
    assert local.finish.usage.cached.decode_device == 36
    assert remote.token_ids == expected_tokens([*PROMPT, 1, 2], 4)
    assert local.token_ids == expected_tokens([*PROMPT, 1, 2, 3], 4)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_the_uncached_part_of_a_prompt_decides_and_not_its_length(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill, config={"max_local_prefill_tokens": 6})

    async def is_local(prompt: list[int]) -> bool:
        before = await _num_local(mesh, decode)
        answer = await mesh.generate(decode, prompt, prefill_address=prefill.address)
        assert answer.token_ids == expected_tokens(prompt, 4)
        return await _num_local(mesh, decode) > before

    assert await is_local([1, 2, 3, 4, 5, 6])
    assert not await is_local([9, 8, 7, 6, 5, 4, 3])
    assert not await is_local(PROMPT)
    # 36 tokens of it are cached by now: five are left, then nine.
    assert await is_local([*PROMPT, 1, 2, 3, 4])
    assert not await is_local([*PROMPT[:36], 5, 4, 3, 2, 1, 2, 3])
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_node_that_prefills_nothing_itself_refuses_a_request_without_a_prefill_node(mesh: FakeMesh) -> None:
    decode = await mesh.decode(config={"max_local_prefill_tokens": 100})
    code, message = await mesh.error(decode, [1, 2])
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "prefill_address: empty" in message


async def test_a_trace_says_why_a_decode_node_computed_the_prompt(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("support.fake_mesh.Telemetry.off", lambda: Telemetry(provider))
    prefill = await mesh.prefill()
    decode = await mesh.decode(config={**FALLBACK, "max_local_prefill_tokens": 6})
    await mesh.generate(decode, PROMPT)
    await mesh.generate(decode, [1, 2, 3], prefill_address=prefill.address)
    await mesh.generate(decode, PROMPT[::-1], prefill_address=prefill.address)
    spans = exporter.get_finished_spans()
    requests = [span for span in spans if span.name == "pdmesh.decode.request"]
    assert [dict(span.attributes or {}).get("pdmesh.local_prefill") for span in requests] == ["fallback", "short", None]
    computed = [span.parent for span in spans if span.name == "pdmesh.prefill.compute"]
    assert computed[:2] == [span.context for span in requests[:2]]


async def test_a_fallback_node_is_ready_without_any_prefill_node(mesh: FakeMesh) -> None:
    dead = "127.0.0.1:1"
    assert not (await mesh.status(await mesh.decode(dead))).serving
    assert (await mesh.status(await mesh.decode(dead, config=FALLBACK))).serving


async def test_a_mesh_whose_prefill_nodes_are_gone_goes_on_and_uses_them_when_they_are_back(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    port = int(prefill.address.rsplit(":", 1)[1])
    decode = await mesh.decode(prefill, config=FALLBACK)
    async with FakeRouter(prefill=[prefill], decode=[decode], poll_interval_s=0.05) as router:
        assert (await router.generate(PROMPT)).token_ids == expected_tokens(PROMPT, 4)
        gate = Gate()
        prefill.executor.before_pass = gate.wait
        running = [asyncio.ensure_future(router.generate([*PROMPT, index], max_tokens=9)) for index in range(3)]
        await until(lambda: prefill.num_handoffs == 3, "the prompts are being prefilled")
        killing = asyncio.ensure_future(mesh.kill(prefill))
        for index, answer in enumerate(await asyncio.gather(*running)):
            assert answer.token_ids == expected_tokens([*PROMPT, index], 9)
            assert answer.finish.num_replacements == 1
        gate.open()
        await killing
        assert await _num_local(mesh, decode) == 3
        assert (await router.generate([5, 4, 3])).token_ids == expected_tokens([5, 4, 3], 4)
        assert await _num_local(mesh, decode) == 4
        again = await mesh.prefill(port=port)
        for index in range(200):
            await router.generate([7, index])
            if again.node.engine.snapshot.num_steps:
                break
            await asyncio.sleep(0.05)
        assert again.node.engine.snapshot.num_steps
    for node in (again, decode):
        await node.assert_all_blocks_return()


async def test_a_client_that_leaves_during_a_local_prefill_leaves_nothing(mesh: FakeMesh) -> None:
    decode = await mesh.decode(config=FALLBACK)
    gate = Gate()
    decode.executor.before_pass = gate.wait
    call = mesh.call(decode, token_ids=PROMPT)
    reading = asyncio.ensure_future(call.read())
    await until(gate.reached.is_set, "the prompt is being computed")
    call.cancel()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await decode.assert_all_blocks_return()


async def test_streams_and_local_prefills_take_turns(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill, config=FALLBACK)
    prompts = [[*PROMPT, index] for index in range(8)]
    answers = await asyncio.gather(
        *(
            mesh.generate(decode, prompt, max_tokens=20, prefill_address=prefill.address if index % 2 else "")
            for index, prompt in enumerate(prompts)
        )
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected_tokens(prompt, 20)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()
