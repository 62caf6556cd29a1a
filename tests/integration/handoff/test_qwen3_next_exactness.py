"""A real model with states and rows, prefilled on one node and decoded on another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from functools import partial

import grpc
import pytest
from pdmesh.v1 import inference_pb2
from support.fake_mesh import Answer, FakeMesh, FakeNode, until
from support.model_core import model_core
from transformers import Qwen3NextForCausalLM
from unit.model_runtime import tiny_qwen3_next
from unit.model_runtime.reference_models import assert_greedy, random_prompt, save

from cache_runtime.transfer.engine import Run, TransferReport
from cache_runtime.transfer.memory_engine import MemoryPeerLink
from model_runtime.checkpoint import Checkpoint, open_checkpoint

GRAIN = 8
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def reference() -> Qwen3NextForCausalLM:
    return tiny_qwen3_next.make_reference()


@pytest.fixture(scope="module")
def checkpoint(reference: Qwen3NextForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(reference, tmp_path_factory.mktemp("model")))


@pytest.fixture
async def mesh(checkpoint: Checkpoint) -> AsyncIterator[FakeMesh]:
    mesh = FakeMesh(partial(model_core, checkpoint=checkpoint))
    yield mesh
    await mesh.close()


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    return random_prompt(num_tokens, seed, tiny_qwen3_next.VOCAB_SIZE)


async def answer(mesh: FakeMesh, decode: FakeNode, prefill: FakeNode, prompt: list[int], **fields: object) -> Answer:
    return await mesh.generate(decode, prompt, prefill_address=prefill.address, **{"max_tokens": NUM_TOKENS, **fields})


@pytest.mark.parametrize("num_tokens", [2 * GRAIN + 3, 5 * GRAIN])
async def test_exact_qwen3_next_ships_the_rows_and_one_state_whatever_the_prompt(
    mesh: FakeMesh, reference: Qwen3NextForCausalLM, num_tokens: int
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    prompt = prompt_of(num_tokens, seed=1)
    told = await answer(mesh, decode, prefill, prompt)
    assert_greedy(reference, prompt, told.token_ids, NUM_TOKENS)
    plan, num_row_blocks = decode.core.executor.plan, -(-num_tokens // GRAIN)
    assert told.finish.timings.transferred_bytes == (
        num_row_blocks * plan.group_layout("full").block_bytes + plan.group_layout("state").block_bytes
    )
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_exact_qwen3_next_state_leaves_with_the_last_chunk_and_the_rows_before(
    mesh: FakeMesh, reference: Qwen3NextForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, posted = MemoryPeerLink.write, []

    def watched(link: MemoryPeerLink, runs: Sequence[Run], **settings: object) -> Future[TransferReport]:
        posted.append(sum(run.length_bytes for run in runs))
        return write(link, runs, **settings)

    monkeypatch.setattr(MemoryPeerLink, "write", watched)
    prefill = await mesh.prefill(token_budget=GRAIN)
    decode = await mesh.decode(prefill)
    await answer(mesh, decode, prefill, [3], max_tokens=1)  # what nodes write to get to know each other is over
    posted.clear()
    plan = decode.core.executor.plan
    num_chunks = 12
    prompt = prompt_of(num_chunks * GRAIN, seed=2)
    told = await answer(mesh, decode, prefill, prompt)
    assert_greedy(reference, prompt, told.token_ids, NUM_TOKENS)
    bytes_of = {field.field_id: field.block_bytes for field in plan.fields}
    rows = [bytes_of[f"layers.{layer}.k"] + bytes_of[f"layers.{layer}.v"] for layer in (1, 4)]
    states = {
        layer: bytes_of[f"layers.{layer}.conv_state"] + bytes_of[f"layers.{layer}.recurrent_state"]
        for layer in (0, 2, 3)
    }
    # The grant may come after some chunks or layers, which then leave together. The last chunk sends layer by layer.
    layers = [states[0], rows[0], states[2], states[3], rows[1]]
    after_grant = posted[1:][-len(layers) :]
    assert after_grant
    assert after_grant == layers[-len(after_grant) :]
    assert sum(posted) == (num_chunks - 1) * sum(rows) + sum(layers)


async def test_exact_qwen3_next_after_prefix_hits_on_either_side(
    mesh: FakeMesh, reference: Qwen3NextForCausalLM
) -> None:
    """Rows that the decode node has are not sent again; a state always is, for it stands behind another token."""
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    shared = prompt_of(5 * GRAIN, seed=4)
    await answer(mesh, decode, prefill, [*shared, 5], max_tokens=2)
    warm = await answer(mesh, decode, prefill, [*shared, 9, 8])
    assert_greedy(reference, [*shared, 9, 8], warm.token_ids, NUM_TOKENS)
    assert warm.finish.usage.cached.decode_device == 5 * GRAIN
    assert warm.finish.timings.transferred_blocks == 1 + 1
    await decode.assert_all_blocks_return()
    cold = await answer(mesh, decode, prefill, [*shared, 9, 8])
    assert cold.token_ids == warm.token_ids
    assert cold.finish.usage.cached == inference_pb2.CachedTokens(prefill_device=5 * GRAIN)
    assert cold.finish.timings.transferred_blocks == 6 + 1


async def test_exact_qwen3_next_for_many_requests_in_arenas_of_two_sizes(
    mesh: FakeMesh, reference: Qwen3NextForCausalLM
) -> None:
    prefill = await mesh.prefill(memory_bytes=900_000)
    decode = await mesh.decode(prefill, memory_bytes=1_200_000)
    shared = prompt_of(2 * GRAIN, seed=5)
    prompts = [[*(shared if index % 2 else []), *prompt_of(5 + 4 * index, seed=index)] for index in range(10)]
    answers = await asyncio.gather(*(answer(mesh, decode, prefill, prompt) for prompt in prompts))
    for prompt, told in zip(prompts, answers, strict=True):
        assert_greedy(reference, prompt, told.token_ids, NUM_TOKENS)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_a_qwen3_next_request_that_is_cancelled_while_it_streams_leaves_no_block_behind(mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    call = mesh.call(decode, token_ids=prompt_of(50, seed=6), prefill_address=prefill.address, max_tokens=180)
    async for response in call:
        if response.HasField("tokens"):
            break
    call.cancel()
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await call.read()
    await until(decode.is_quiet, "the decode node let go")
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_nodes_whose_states_differ_are_no_peers_and_the_difference_is_named(
    mesh: FakeMesh, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tiny_qwen3_next.make_reference(linear_value_head_dim=12)
    directory = save(other, tmp_path_factory.mktemp("other"))
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill, checkpoint=open_checkpoint(directory))
    code, message = await mesh.error(decode, [5, 6, 7], prefill_address=prefill.address)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert 'group "state" fields "layers.0.recurrent_state", ' in message
    assert "block_shape prefill=[4, 12, 10], decode=[4, 12, 12]" in message
