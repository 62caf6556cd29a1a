"""Biases, penalties and log-probabilities of prompts: on one node and across a handoff what the reference has."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import grpc
import pytest
import torch
from pdmesh.v1 import decode_pb2, inference_pb2
from support.fake_mesh import Answer, FakeMesh, FakeNode
from support.model_core import model_core
from support.tiny_checkpoint import write_tiny_checkpoint
from transformers import LlamaForCausalLM, PreTrainedModel, RepetitionPenaltyLogitsProcessor
from unit.model_runtime.reference_models import random_prompt, reference_logits

from model_runtime.checkpoint import Checkpoint, open_checkpoint

GRAIN = 8
NUM_TOKENS = 24
NEAR = 1e-4
OPTIONS = {
    "a bias": {"logit_bias": {5: 2.5, 7: -100.0, 250: 1.5}},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.75},
    "repetition": {"repetition_penalty": 1.4},
    "a wish for repetition": {"frequency_penalty": -1.0, "repetition_penalty": 0.7},
    "all": {
        "logit_bias": {11: 1.0},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.2,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A reference model and the same weights here."""

    reference: PreTrainedModel
    checkpoint: Checkpoint

    def prompt(self, num_tokens: int, seed: int) -> list[int]:
        return random_prompt(num_tokens, seed, self.checkpoint.config.vocab_size - 1)

    def greedy(self, prompt: list[int], num_tokens: int, options: dict[str, object]) -> list[int]:
        """The most likely tokens once the reference's own logits are changed."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_tokens:
            scores = reference_logits(self.reference, tokens)[-1:].clone()
            if "repetition_penalty" in options:
                scores = RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])(torch.tensor([tokens]), scores)
            for token_id, count in Counter(tokens[len(prompt) :]).items():
                scores[0, token_id] -= count * options.get("frequency_penalty", 0.0)
                scores[0, token_id] -= options.get("presence_penalty", 0.0)
            for token_id, bias in options.get("logit_bias", {}).items():
                scores[0, token_id] += bias
            tokens.append(int(scores[0].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Pair(reference=reference, checkpoint=open_checkpoint(folder))


@pytest.fixture
async def mesh(pair: Pair) -> AsyncIterator[FakeMesh]:
    mesh = FakeMesh(partial(model_core, checkpoint=pair.checkpoint))
    yield mesh
    await mesh.close()


async def _answer(mesh: FakeMesh, node: FakeNode, prefill: FakeNode, prompt: list[int], **fields: object) -> Answer:
    return await mesh.generate(node, prompt, prefill_address=prefill.address, **{"max_tokens": NUM_TOKENS, **fields})


@pytest.mark.parametrize("name", OPTIONS)
async def test_exact_with_biases_and_penalties_fused_disaggregated_resumed_and_as_the_reference(
    pair: Pair, mesh: FakeMesh, name: str
) -> None:
    prefill = await mesh.prefill()
    decode, fused = await mesh.decode(prefill), await mesh.fused()
    options = OPTIONS[name]
    # Its own tokens come again in the prompt, so that what counts where matters.
    prompt = pair.prompt(3 * GRAIN, seed=2) * 2
    expected = pair.greedy(prompt, NUM_TOKENS, options)
    assert expected != pair.greedy(prompt, NUM_TOKENS, {})
    sampling = inference_pb2.SamplingParams(**options)
    for node in (decode, fused):
        told = await _answer(mesh, node, prefill, prompt, sampling=sampling)
        assert told.token_ids == expected
        # Behind output of another node, whose tokens count as output and not as prompt.
        for num_sent in (1, 9):
            resumed = {"num_output_tokens": num_sent, "max_tokens": NUM_TOKENS - num_sent}
            told = await _answer(mesh, node, prefill, [*prompt, *expected[:num_sent]], sampling=sampling, **resumed)
            assert told.token_ids == expected[num_sent:]
    sampling.temperature, sampling.seed = 1.0, 9
    sampled = [await _answer(mesh, node, prefill, prompt, sampling=sampling) for node in (decode, fused)]
    assert sampled[0].token_ids == sampled[1].token_ids != expected
    for node in (prefill, decode, fused):
        await node.assert_all_blocks_return()


async def test_a_banned_token_never_comes_and_a_forced_one_always_and_logprobs_stay_those_of_the_model(
    pair: Pair, mesh: FakeMesh
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    prompt = pair.prompt(20, seed=3)
    forced = inference_pb2.SamplingParams(logit_bias={42: 100.0}, temperature=1.0, seed=1)
    told = await _answer(mesh, decode, prefill, prompt, sampling=forced, num_logprobs=1)
    assert set(told.token_ids) == {42}
    logits = reference_logits(pair.reference, [*prompt, *told.token_ids])
    logprobs = torch.log_softmax(logits.double(), -1)[len(prompt) - 1 : -1]
    for token, row in zip(told.tokens, logprobs, strict=True):
        assert token.logprob == pytest.approx(float(row[42]), abs=NEAR)
        assert token.top_logprobs[0].token_id == int(row.argmax())


def _assert_prompt_is_told(pair: Pair, prompt: list[int], told: Answer, num_alternatives: int) -> None:
    expected = torch.log_softmax(reference_logits(pair.reference, prompt).double(), -1)
    assert told.admitted is not None
    tokens = list(told.admitted.prompt_logprobs)
    assert [token.token_id for token in tokens] == prompt[1:]
    for position, token in enumerate(tokens):
        row = expected[position]
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=NEAR)
        assert len(token.top_logprobs) == num_alternatives
        best = torch.topk(row, num_alternatives).values
        for alternative, logprob in zip(token.top_logprobs, best.tolist(), strict=True):
            assert alternative.logprob == pytest.approx(logprob, abs=NEAR)


@pytest.mark.parametrize("num_tokens", [1, 2, GRAIN, 45])
async def test_exact_prompt_logprobs_whatever_is_cached_and_however_the_prompt_is_cut(
    pair: Pair, mesh: FakeMesh, num_tokens: int
) -> None:
    # Two prompts at a time share the chunks of 16 tokens.
    prefill = await mesh.prefill()
    decode, fused = await mesh.decode(prefill), await mesh.fused()
    prompt = pair.prompt(num_tokens, seed=num_tokens)
    plain = [await _answer(mesh, node, prefill, prompt) for node in (decode, fused)]
    for node in (decode, fused):
        for num_alternatives in (0, 3):
            told = await _answer(mesh, node, prefill, prompt, num_prompt_logprobs=num_alternatives)
            _assert_prompt_is_told(pair, prompt, told, num_alternatives)
            assert told.token_ids == plain[0].token_ids == plain[1].token_ids
            # The prompt is in every cache, and none of it was used.
            assert told.finish.usage.cached == inference_pb2.CachedTokens()
    # Nor does what was computed for it spoil what others find.
    warm = await _answer(mesh, decode, prefill, prompt)
    assert warm.token_ids == plain[0].token_ids
    assert not warm.admitted.prompt_logprobs
    for node in (prefill, decode, fused):
        await node.assert_all_blocks_return()


async def test_exact_prompt_logprobs_where_a_decode_node_prefills_itself_and_beside_others(
    pair: Pair, mesh: FakeMesh
) -> None:
    decode = await mesh.decode(config={"local_prefill": "fallback"})
    prompts = [pair.prompt(9 + 5 * index, seed=index) for index in range(4)]
    calls = [
        mesh.generate(decode, prompt, max_tokens=3, **({"num_prompt_logprobs": 2} if index % 2 else {}))
        for index, prompt in enumerate(prompts)
    ]
    for index, (prompt, call) in enumerate(zip(prompts, calls, strict=True)):
        told = await call
        if index % 2:
            _assert_prompt_is_told(pair, prompt, told, 2)
        else:
            assert not told.admitted.prompt_logprobs
    await decode.assert_all_blocks_return()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling": {"logit_bias": {257: 1.0}}}, "sampling.logit_bias: token 257 is outside [0, 257)"),
        ({"sampling": {"logit_bias": {1: 101.0}}}, "sampling.logit_bias[1]: 101 given"),
        ({"sampling": {"logit_bias": {1: float("nan")}}}, "sampling.logit_bias[1]: nan given"),
        ({"sampling": {"presence_penalty": 2.5}}, "sampling.presence_penalty: 2.5 given"),
        ({"sampling": {"frequency_penalty": -3.0}}, "sampling.frequency_penalty: -3 given"),
        ({"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty: 0 given"),
        ({"num_prompt_logprobs": 21}, "num_prompt_logprobs: 21 given, at most 20 allowed"),
        ({"num_prompt_logprobs": 1, "num_output_tokens": 1}, "num_prompt_logprobs: not with num_output_tokens=1"),
    ],
)
async def test_an_option_out_of_bounds_is_refused_by_field_and_limit_before_anything_starts(
    mesh: FakeMesh, fields: dict[str, object], words: str
) -> None:
    prefill = await mesh.prefill()
    decode = await mesh.decode(prefill)
    request = decode_pb2.DecodeRequest(**fields)
    given = {name.name: value for name, value in request.ListFields()}
    code, message = await mesh.error(decode, [1, 2, 3], prefill_address=prefill.address, **given)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in message
    assert prefill.is_quiet()
