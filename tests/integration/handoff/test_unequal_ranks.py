"""Prefill and decode nodes of like and unlike numbers of tensor ranks, over real models, schedulers and gRPC.

The text and its log-probabilities are those of one rank that does everything, to the bit. Nodes of one rank each are in
`test_family_exactness.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import pytest
from pdmesh.v1 import inference_pb2
from support.fake_mesh import FakeMesh, FakeNode
from support.model_core import model_core
from support.rank_threads import RankThreads
from transformers import PreTrainedModel
from unit.model_runtime import tiny_gemma3, tiny_kimi_linear, tiny_llama, tiny_qwen3_next
from unit.model_runtime.reference_models import random_prompt, save
from unit.model_runtime.tiny_models import TINY_MODELS

from model_runtime.checkpoint import Checkpoint, open_checkpoint

NUM_TOKENS = 8
# Full attention, windows, states and latent rows; heads that ranks share out, and those that are repeated.
MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama.make_reference,
    "llama with one kv head": lambda: tiny_llama.make_reference(num_kv_heads=1),
    "gemma3": tiny_gemma3.make_reference,
    "qwen3_next": tiny_qwen3_next.make_reference,
    "qwen3_next with one key head": lambda: tiny_qwen3_next.make_reference(linear_num_key_heads=1),
    **{name: TINY_MODELS[name] for name in ("mamba", "deepseek_v2", "dsa")},
    "kimi": lambda: tiny_kimi_linear.make_reference(linear_num_heads=4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt, and one that hits its first grains in the cache of either node; what one rank alone says to both."""

    checkpoint: Checkpoint
    prompts: Sequence[Sequence[int]]
    expected: Sequence[Sequence[inference_pb2.SampledToken]]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    checkpoint = open_checkpoint(save(MODELS[request.param](), tmp_path_factory.mktemp("model")))
    vocab_size = checkpoint.config.vocab_size
    first = random_prompt(37, 1, vocab_size)
    prompts = (first, [*first[:24], *random_prompt(13, 2, vocab_size)])
    return Case(checkpoint=checkpoint, prompts=prompts, expected=asyncio.run(generate_alone(checkpoint, prompts)))


async def generate_alone(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]]
) -> Sequence[Sequence[inference_pb2.SampledToken]]:
    mesh = mesh_of(checkpoint)
    try:
        fused = await mesh.fused()
        return [await tokens(mesh, fused, prompt) for prompt in prompts]
    finally:
        await mesh.close()


def mesh_of(checkpoint: Checkpoint) -> FakeMesh:
    """Prompts are computed in chunks."""
    return FakeMesh(partial(model_core, checkpoint=checkpoint, memory_bytes=2 << 20, token_budget=9))


async def tokens(
    mesh: FakeMesh, node: FakeNode, prompt: Sequence[int], **fields: object
) -> Sequence[inference_pb2.SampledToken]:
    answer = await mesh.generate(node, prompt, max_tokens=NUM_TOKENS, num_logprobs=3, **fields)
    return answer.tokens


def assert_ranks_hold_nothing(node: FakeNode) -> None:
    """Of a node that was stopped: its ranks have carried out everything, and are where the first one is."""
    if node.core.ranks is None:
        return
    ranks = cast(RankThreads, node.core.ranks)
    assert not ranks.failures
    assert len({part.scheduler.describe() for part in ranks.parts}) == 1
    for part in ranks.parts:
        capacity = part.scheduler.capacity()
        assert capacity.empty_lcm_blocks == capacity.total_lcm_blocks


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 2), (2, 1), (2, 2)])
async def test_exact_text_and_logprobs_are_those_of_one_rank(case: Case, num_prefill: int, num_decode: int) -> None:
    """A prompt in chunks, then one that hits the cache of both nodes and hands over the rest."""
    mesh = mesh_of(case.checkpoint)
    try:
        prefill = await mesh.prefill(num_ranks=num_prefill)
        verifying = {"verify_transfers": "all"}
        decode = await mesh.decode(prefill, num_ranks=num_decode, memory_bytes=3 << 20, config=verifying)
        told = [await tokens(mesh, decode, prompt, prefill_address=prefill.address) for prompt in case.prompts]
        status = await mesh.status(decode)
        for node in (prefill, decode):
            await node.assert_all_blocks_return()
    finally:
        await mesh.close()
    assert told == case.expected
    assert (status.num_verified_handoffs, status.num_damaged_handoffs) == (len(case.prompts), 0)
    for node in (prefill, decode):
        assert_ranks_hold_nothing(node)
