"""Every family prefilled on one node and decoded on another: the tokens of a fused node and of the reference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import pytest
from pdmesh.v1 import inference_pb2
from support.fake_mesh import Answer, FakeMesh, FakeNode
from support.model_core import model_core
from support.resuming import assert_goes_on_anywhere
from transformers import PreTrainedModel
from unit.model_runtime.reference_models import assert_greedy, random_prompt, save
from unit.model_runtime.tiny_models import TINY_MODELS

from cache_runtime.recipes.spec import CacheFamily
from model_runtime.checkpoint import Checkpoint, open_checkpoint

GRAIN = 8
NUM_TOKENS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A reference model and the same weights here."""

    reference: PreTrainedModel
    checkpoint: Checkpoint

    def prompt(self, num_tokens: int, seed: int) -> list[int]:
        return random_prompt(num_tokens, seed, self.checkpoint.config.vocab_size)

    def assert_exact(self, prompt: list[int], token_ids: list[int]) -> None:
        assert_greedy(self.reference, prompt, token_ids, NUM_TOKENS)


@pytest.fixture(scope="module", params=TINY_MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    reference = TINY_MODELS[request.param]()
    directory = save(reference, tmp_path_factory.mktemp("model"))
    return Pair(reference=reference, checkpoint=open_checkpoint(directory))


@pytest.fixture
async def mesh(pair: Pair) -> AsyncIterator[FakeMesh]:
    mesh = FakeMesh(partial(model_core, checkpoint=pair.checkpoint))
    yield mesh
    await mesh.close()


async def answer(mesh: FakeMesh, decode: FakeNode, prefill: FakeNode, prompt: list[int], **fields: object) -> Answer:
    return await mesh.generate(decode, prompt, prefill_address=prefill.address, **{"max_tokens": NUM_TOKENS, **fields})


def num_shipped(node: FakeNode, num_tokens: int, hit_tokens: int) -> int:
    """Of rows all that is missing, of a state the last snapshot, unless the hit ends where it stands."""
    end_slot = -(-num_tokens // GRAIN)
    return sum(
        1 if group.family is CacheFamily.STATE else end_slot - hit_tokens // GRAIN
        for group in node.core.executor.plan.groups
    )


@pytest.mark.parametrize("num_tokens", [1, GRAIN, 3 * GRAIN, 45])
async def test_exact_disaggregated_equals_fused_equals_the_reference(
    pair: Pair, mesh: FakeMesh, num_tokens: int
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    fused = await mesh.fused()
    prompt = pair.prompt(num_tokens, seed=num_tokens)
    disaggregated = await answer(mesh, decode, prefill, prompt)
    alone = await answer(mesh, fused, prefill, prompt)
    assert disaggregated.token_ids == alone.token_ids
    pair.assert_exact(prompt, disaggregated.token_ids)
    assert disaggregated.finish.timings.transferred_blocks == num_shipped(decode, num_tokens, 0)
    for node in (prefill, decode, fused):
        await node.assert_all_blocks_return()


async def test_exact_after_prefix_hits_on_either_side(pair: Pair, mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill, config={"verify_transfers": "all"})
    shared = pair.prompt(5 * GRAIN, seed=4)
    await answer(mesh, decode, prefill, [*shared, 5], max_tokens=2)
    warm = await answer(mesh, decode, prefill, [*shared, 9, 8])
    pair.assert_exact([*shared, 9, 8], warm.token_ids)
    await decode.assert_all_blocks_return()
    cold = await answer(mesh, decode, prefill, [*shared, 9, 8])
    assert cold.token_ids == warm.token_ids
    assert cold.finish.usage.cached == inference_pb2.CachedTokens(prefill_device=5 * GRAIN)
    assert cold.finish.timings.transferred_blocks == num_shipped(decode, 5 * GRAIN + 2, 0)
    # Of every kind of group.
    assert (await mesh.status(decode)).num_verified_handoffs == 3


async def test_exact_for_many_requests_at_a_time(pair: Pair, mesh: FakeMesh) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    shared = pair.prompt(2 * GRAIN, seed=5)
    prompts = [[*(shared if index % 2 else []), *pair.prompt(5 + 4 * index, seed=index)] for index in range(8)]
    answers = await asyncio.gather(*(answer(mesh, decode, prefill, prompt) for prompt in prompts))
    for prompt, told in zip(prompts, answers, strict=True):
        pair.assert_exact(prompt, told.token_ids)
    for node in (prefill, decode):
        await node.assert_all_blocks_return()


async def test_exact_without_a_prefill_node_and_behind_output_of_another_node(pair: Pair, mesh: FakeMesh) -> None:
    prompt = pair.prompt(3 * GRAIN + 3, seed=6)
    await assert_goes_on_anywhere(mesh, prompt, max_tokens=NUM_TOKENS, nums_before=(1, 11))
