"""Disaggregated output equals fused output equals the reference, token for token, on the real model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support import prompts
from support.mesh import Answer, Client, Mesh
from support.reference import TIE, Reference, assert_same_greedy_tokens

NUM_TOKENS = 64


def greedy_requests() -> dict[str, dict[str, object]]:
    texts = {name: {"text": text} for name, text in prompts.TEXTS.items()}
    chats = {name: {"chat": messages} for name, messages in prompts.CHATS.items()}
    lengths = {f"{length} tokens": {"token_ids": prompts.token_prompt(length)} for length in prompts.TOKEN_LENGTHS}
    return {**texts, **chats, **lengths}


def answer_all(client: Client, requests: dict[str, dict[str, object]], **fields: object) -> dict[str, Answer]:
    """All of them at once, so that they share batches."""
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = {name: pool.submit(client.generate, 250.0, **request, **fields) for name, request in requests.items()}
        return {name: future.result() for name, future in futures.items()}


@pytest.fixture(scope="module")
def disaggregated(mesh: Mesh) -> dict[str, Answer]:
    return answer_all(mesh.client, greedy_requests(), max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=2)


@pytest.fixture(scope="module")
def fused(fused_mesh: Mesh) -> dict[str, Answer]:
    return answer_all(fused_mesh.client, greedy_requests(), max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=2)


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Reference:
    return Reference(model_path)


def prompt_ids(reference: Reference, request: dict[str, object]) -> list[int]:
    if "token_ids" in request:
        return list(request["token_ids"])
    if "text" in request:
        return list(reference.tokenizer.encode(request["text"], add_special_tokens=False))
    messages = [{"role": role, "content": content} for role, content in request["chat"]]
    rendered = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(reference.tokenizer.encode(rendered, add_special_tokens=False))


def test_exact_llama_disaggregated_equals_fused(disaggregated: dict[str, Answer], fused: dict[str, Answer]) -> None:
    for name, answer in disaggregated.items():
        assert answer.token_ids == fused[name].token_ids, name
        assert answer.text == fused[name].text, name
        assert len(answer.token_ids) == NUM_TOKENS, name


def test_exact_llama_disaggregated_equals_transformers(disaggregated: dict[str, Answer], reference: Reference) -> None:
    for name, request in greedy_requests().items():
        ids = prompt_ids(reference, request)
        answer = disaggregated[name]
        assert answer.finish is not None
        assert answer.finish.usage.prompt_tokens == len(ids), name
        logprobs = [token.logprob for token in answer.tokens]
        choices = reference.choices_along(ids, answer.token_ids)
        assert_same_greedy_tokens(choices, answer.token_ids, logprobs, name)


def test_text_deltas_are_the_decoded_tokens(disaggregated: dict[str, Answer], reference: Reference) -> None:
    for name, answer in disaggregated.items():
        assert answer.text == reference.tokenizer.decode(answer.token_ids, skip_special_tokens=True), name


def test_the_prefill_really_ran_on_the_other_node(disaggregated: dict[str, Answer], mesh: Mesh) -> None:
    prefill, decode = (mesh.nodes[role].info().node_id for role in ("prefill", "decode"))
    for name, answer in disaggregated.items():
        assert answer.placement is not None
        assert answer.finish is not None
        assert (answer.placement.prefill_node, answer.placement.decode_node) == (prefill, decode)
        assert answer.finish.timings.transferred_bytes > 0, name


@pytest.mark.parametrize("seed", [1, 2**64 - 1])
def test_exact_llama_sampled_with_a_seed_disaggregated_equals_fused(mesh: Mesh, fused_mesh: Mesh, seed: int) -> None:
    sampling = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": seed}
    requests = {name: {"text": text} for name, text in list(prompts.TEXTS.items())[:6]}
    ours = answer_all(mesh.client, requests, sampling=sampling, max_tokens=32, ignore_eos=True)
    theirs = answer_all(fused_mesh.client, requests, sampling=sampling, max_tokens=32, ignore_eos=True)
    assert {name: answer.token_ids for name, answer in ours.items()} == {
        name: answer.token_ids for name, answer in theirs.items()
    }


def test_exact_llama_samples_are_what_requests_of_their_own_get_on_a_fused_node(mesh: Mesh, fused_mesh: Mesh) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.5, "logit_bias": {40: 2.0}, "seed": 21}
    fields = {"text": prompts.TEXTS["short"], "max_tokens": 24, "ignore_eos": True}
    samples: dict[int, list[int]] = {}
    for response in mesh.client.start(sampling=sampling, num_samples=3, **fields):
        samples.setdefault(response.index, []).extend(token.token_id for token in response.delta.tokens)
    for index in range(3):
        alone = fused_mesh.client.generate(sampling={**sampling, "seed": 21 + index}, **fields)
        assert samples[index] == alone.token_ids
    assert samples[0] != samples[1]


def test_exact_llama_prompt_logprobs_are_those_of_the_reference(mesh: Mesh, reference: Reference) -> None:
    token_ids = prompts.token_prompt(90)
    for _ in range(2):
        # The second time the prompt is in every cache.
        (told,) = (
            response.prompt_logprobs.tokens
            for response in mesh.client.start(token_ids=token_ids, max_tokens=1, num_prompt_logprobs=0)
            if response.HasField("prompt_logprobs")
        )
        assert [token.token_id for token in told] == token_ids
        with torch.inference_mode():
            logits = reference.model(torch.tensor([token_ids])).logits[0]
        expected = torch.log_softmax(logits.double(), -1)
        for position, token in enumerate(told[1:], start=1):
            assert token.logprob == pytest.approx(float(expected[position - 1, token.token_id]), abs=TIE)


def test_different_seeds_give_different_text(mesh: Mesh) -> None:
    answers = [
        mesh.client.generate(text="Once upon a time", sampling={"temperature": 1.0, "seed": seed}, max_tokens=16)
        for seed in (1, 2)
    ]
    assert answers[0].token_ids != answers[1].token_ids


def test_log_probabilities_name_the_likeliest_tokens(disaggregated: dict[str, Answer]) -> None:
    for token in disaggregated["short"].tokens:
        assert token.top_logprobs[0].token_id == token.token_id
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
