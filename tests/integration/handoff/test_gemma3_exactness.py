"""A real model with a sliding and a full group, prefilled on one node and decoded on another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest
from pdmesh.v1 import inference_pb2
from support.fake_mesh import Answer, FakeMesh, FakeNode, until
from support.model_core import model_core
from support.resuming import assert_goes_on_anywhere
from transformers import Gemma3ForCausalLM
from unit.model_runtime import tiny_gemma3
from unit.model_runtime.reference_models import assert_greedy

from model_runtime.checkpoint import Checkpoint, open_checkpoint

GRAIN = 8
WINDOW = tiny_gemma3.WINDOW_TOKENS
NUM_TOKENS = 2 * WINDOW


@pytest.fixture(scope="module")
def reference() -> Gemma3ForCausalLM:
    return tiny_gemma3.make_reference()


@pytest.fixture(scope="module")
def checkpoint(reference: Gemma3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_gemma3.save(reference, tmp_path_factory.mktemp("model")))


@pytest.fixture
async def mesh(checkpoint: Checkpoint) -> AsyncIterator[FakeMesh]:
    mesh = FakeMesh(partial(model_core, checkpoint=checkpoint))
    yield mesh
    await mesh.close()


async def answer(mesh: FakeMesh, decode: FakeNode, prefill: FakeNode, prompt: list[int], **fields: object) -> Answer:
    return await mesh.generate(decode, prompt, prefill_address=prefill.address, **{"max_tokens": NUM_TOKENS, **fields})


def num_blocks(num_tokens: int, hit_tokens: int = 0) -> int:
    """What a handoff of a prompt moves: all that the full group lacks, and the tail that the window keeps."""
    end = -(-num_tokens // GRAIN)
    expired = max(0, num_tokens - WINDOW + 1) // GRAIN
    return (end - hit_tokens // GRAIN) + (end - max(expired, hit_tokens // GRAIN))


@pytest.mark.parametrize("num_tokens", [1, GRAIN, WINDOW, WINDOW + 1, 3 * GRAIN, 45])
async def test_exact_gemma3_disaggregated_equals_fused_equals_the_reference(
    mesh: FakeMesh, reference: Gemma3ForCausalLM, num_tokens: int
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    fused = await mesh.fused()
    prompt = tiny_gemma3.random_prompt(num_tokens, seed=num_tokens)
    disaggregated = await answer(mesh, decode, prefill, prompt)
    alone = await answer(mesh, fused, prefill, prompt)
    assert disaggregated.token_ids == alone.token_ids
    assert_greedy(reference, prompt, disaggregated.token_ids, NUM_TOKENS)
    assert disaggregated.finish.timings.transferred_blocks == num_blocks(num_tokens)
    for node in (prefill, decode, fused):
        await node.assert_all_blocks_return()


async def test_exact_gemma3_with_a_window_that_ships_only_its_tail(
    mesh: FakeMesh, reference: Gemma3ForCausalLM
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    prompt = tiny_gemma3.random_prompt(100, seed=3)
    told = await answer(mesh, decode, prefill, prompt)
    assert_greedy(reference, prompt, told.token_ids, NUM_TOKENS)
    # Thirteen blocks of the full group, two of the sliding one.
    assert told.finish.timings.transferred_blocks == 13 + 2
    plan = decode.core.executor.plan
    expected_bytes = 13 * plan.group_layout("full").block_bytes + 2 * plan.group_layout("sliding").block_bytes
    assert told.finish.timings.transferred_bytes == expected_bytes


async def test_exact_gemma3_after_prefix_hits_on_either_side(mesh: FakeMesh, reference: Gemma3ForCausalLM) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    shared = tiny_gemma3.random_prompt(5 * GRAIN, seed=4)
    await answer(mesh, decode, prefill, [*shared, 5], max_tokens=2)
    warm = await answer(mesh, decode, prefill, [*shared, 9, 8])
    assert_greedy(reference, [*shared, 9, 8], warm.token_ids, NUM_TOKENS)
    assert warm.finish.usage.cached.decode_device == 5 * GRAIN
    assert warm.finish.timings.transferred_blocks == num_blocks(5 * GRAIN + 2, 5 * GRAIN) == 2
    await decode.assert_all_blocks_return()
    cold = await answer(mesh, decode, prefill, [*shared, 9, 8])
    assert cold.token_ids == warm.token_ids
    assert cold.finish.usage.cached == inference_pb2.CachedTokens(prefill_device=5 * GRAIN)
    assert cold.finish.timings.transferred_blocks == num_blocks(5 * GRAIN + 2)


async def test_exact_gemma3_without_a_prefill_node_and_behind_output_of_another_node(mesh: FakeMesh) -> None:
    prompt = tiny_gemma3.random_prompt(3 * GRAIN + 3, seed=6)
    # Within the window of the prompt's end, and when the window has left the prompt.
    await assert_goes_on_anywhere(mesh, prompt, max_tokens=NUM_TOKENS, nums_before=(1, WINDOW + 2))


async def test_exact_gemma3_for_many_requests_in_arenas_of_two_sizes(
    mesh: FakeMesh, reference: Gemma3ForCausalLM
) -> None:
    prefill = await mesh.prefill(memory_bytes=600_000)
    decode = await mesh.decode(prefill, memory_bytes=900_000)
    shared = tiny_gemma3.random_prompt(2 * GRAIN, seed=5)
    prompts = [
        [*(shared if index % 2 else []), *tiny_gemma3.random_prompt(5 + 4 * index, seed=index)] for index in range(10)
    ]
    answers = await asyncio.gather(*(answer(mesh, decode, prefill, prompt) for prompt in prompts))
    for prompt, told in zip(prompts, answers, strict=True):
        assert_greedy(reference, prompt, told.token_ids, NUM_TOKENS)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_gemma3_request_that_is_cancelled_while_it_streams_leaves_no_block_behind(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    prompt = tiny_gemma3.random_prompt(50, seed=6)
    call = mesh.call(decode, token_ids=prompt, prefill_address=prefill.address, max_tokens=180)
    async for response in call:
        if response.HasField("tokens"):
            break
    call.cancel()
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await call.read()
    await until(decode.is_quiet, "the decode node let go")
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_nodes_whose_windows_differ_are_no_peers_and_the_difference_is_named(
    mesh: FakeMesh, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tiny_gemma3.make_reference(window_tokens=WINDOW + 1)
    directory = tiny_gemma3.save(other, tmp_path_factory.mktemp("other"))
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill, checkpoint=open_checkpoint(directory))
    code, message = await mesh.error(decode, [5, 6, 7], prefill_address=prefill.address)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f'group "sliding": sliding_window_tokens prefill={WINDOW}, decode={WINDOW + 1}' in message
