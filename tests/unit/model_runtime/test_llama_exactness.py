"""Our Llama against the reference implementation on the same random weights: same tokens, logits within 1e-4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from unit.model_runtime import tiny_llama
from unit.model_runtime.model_bench import ModelBench
from unit.model_runtime.paged_batches import Row
from unit.model_runtime.reference_models import assert_greedy

from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.kernels.reference import ReferenceKernels

TOLERANCE = 1e-4
BLOCK = 8

Pair = tuple[LlamaForCausalLM, ModelBench]
Variant = dict[str, object]
VARIANTS: dict[str, Variant] = {
    "grouped query": {"num_heads": 6, "num_kv_heads": 2},
    "one head per key": {"num_heads": 4, "num_kv_heads": 4},
    "one key head": {"num_heads": 4, "num_kv_heads": 1},
    "untied head": {"tied": False},
    "head wider than a vector": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 72},
    "head narrower than a vector": {"head_dim": 6},
    "llama3 rope": {"rope_parameters": tiny_llama.LLAMA3_ROPE},
}


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS.keys())
def variant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LlamaForCausalLM, Checkpoint]:
    reference = tiny_llama.make_reference(**request.param)
    return reference, open_checkpoint(tiny_llama.save(reference, tmp_path_factory.mktemp("variant")))


@pytest.fixture
def pair(variant: tuple[LlamaForCausalLM, Checkpoint]) -> Pair:
    reference, checkpoint = variant
    return reference, ModelBench(checkpoint, block_granularity=BLOCK)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).abs().max()) < TOLERANCE


@pytest.mark.parametrize("prompt_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 70])
def test_llama_prefill_logits_are_exact_for_every_prompt_length(pair: Pair, prompt_tokens: int) -> None:
    reference, bench = pair
    prompt = tiny_llama.random_prompt(prompt_tokens, seed=prompt_tokens)
    expected = tiny_llama.reference_logits(reference, prompt)[-1]
    assert close(bench.prefill("a", prompt, chunk_tokens=len(prompt)), expected)


@pytest.mark.parametrize("chunk_tokens", [1, 3, BLOCK, 33])
def test_llama_chunked_prefill_is_exact_for_every_chunk_size(pair: Pair, chunk_tokens: int) -> None:
    reference, bench = pair
    prompt = tiny_llama.random_prompt(41, seed=1)
    expected = tiny_llama.reference_logits(reference, prompt)[-1]
    assert close(bench.prefill("a", prompt, chunk_tokens), expected)


def test_llama_greedy_decode_over_the_paged_cache_gives_the_exact_tokens(pair: Pair) -> None:
    reference, bench = pair
    prompt = tiny_llama.random_prompt(13, seed=2)
    tokens = bench.greedy("a", prompt, 40, chunk_tokens=5)
    assert_greedy(reference, prompt, tokens, 40)
    assert len(set(tokens)) > 5, "a degenerate continuation would prove little"


def test_llama_rows_of_a_mixed_batch_are_exact_each_on_its_own(pair: Pair) -> None:
    reference, bench = pair
    prompts = {
        name: tiny_llama.random_prompt(num, seed=num) for name, num in (("a", 21), ("b", 9), ("c", 30), ("d", 5))
    }
    bench.prefill("a", prompts["a"][:-1], 20)
    bench.prefill("b", prompts["b"][:-1], 20)
    bench.logits(Row(request_id="c", tokens=prompts["c"][:11], wants_logits=False))
    logits = bench.logits(
        Row(request_id="c", tokens=prompts["c"][11:]),
        Row(request_id="d", tokens=prompts["d"][:2], wants_logits=False),
        Row(request_id="a", tokens=prompts["a"][-1:]),
        Row(request_id="b", tokens=prompts["b"][-1:]),
    )
    assert logits.shape == (3, tiny_llama.VOCAB_SIZE)
    for row_logits, name in zip(logits, ("c", "a", "b"), strict=True):
        assert close(row_logits, tiny_llama.reference_logits(reference, prompts[name])[-1])
    assert close(
        bench.logits(Row(request_id="d", tokens=prompts["d"][2:]))[0],
        tiny_llama.reference_logits(reference, prompts["d"])[-1],
    )


@pytest.mark.parametrize("page_tokens", [1, 2, 8])
def test_llama_logits_are_exact_for_every_kernel_page_size(tmp_path: Path, page_tokens: int) -> None:
    reference = tiny_llama.make_reference()
    bench = ModelBench(open_checkpoint(tiny_llama.save(reference, tmp_path)), kernel_page_size=page_tokens)
    prompt = tiny_llama.random_prompt(29, seed=3)
    assert close(bench.prefill("a", prompt, 7), tiny_llama.reference_logits(reference, prompt)[-1])


def test_llama_on_the_reference_kernels_is_exact_too(tmp_path: Path) -> None:
    reference = tiny_llama.make_reference()
    bench = ModelBench(open_checkpoint(tiny_llama.save(reference, tmp_path)), kernels=ReferenceKernels())
    prompt = tiny_llama.random_prompt(29, seed=4)
    assert close(bench.prefill("a", prompt, 7), tiny_llama.reference_logits(reference, prompt)[-1])


def test_a_layer_is_reported_as_stored_while_later_layers_are_not_yet_written(tmp_path: Path) -> None:
    reference = tiny_llama.make_reference(num_layers=3)
    bench = ModelBench(open_checkpoint(tiny_llama.save(reference, tmp_path)))
    written: list[tuple[int, list[bool]]] = []

    def note_written(layer: int) -> None:
        fields = [bench.arena.field(f"layers.{index}.{name}") for index in range(3) for name in ("k", "v")]
        written.append((layer, [bool(tensor.any()) for tensor in fields]))

    bench.on_stored = note_written
    bench.prefill("a", tiny_llama.random_prompt(5, seed=5), 5)
    assert written == [
        (0, [True, True, False, False, False, False]),
        (1, [True, True, True, True, False, False]),
        (2, [True] * 6),
    ]


def test_llama_writes_no_cache_row_outside_its_requests_blocks(tmp_path: Path) -> None:
    reference = tiny_llama.make_reference()
    bench = ModelBench(open_checkpoint(tiny_llama.save(reference, tmp_path)), block_granularity=BLOCK)
    bench.prefill("a", tiny_llama.random_prompt(BLOCK + 3, seed=6), 4)
    written_rows = bench.arena.field("layers.0.k").flatten(2).any(dim=2)
    assert int(written_rows.sum()) == BLOCK + 3
    assert int(written_rows.any(dim=1).sum()) == 2
    assert not bool(written_rows[0].any()), "the null block stays clear"


@pytest.mark.parametrize("chunk_tokens", [1, 3, BLOCK, 33])
def test_llama_logits_have_the_same_bits_however_a_prompt_is_cut_and_whoever_shares_the_batch(
    pair: Pair, chunk_tokens: int
) -> None:
    _, bench = pair
    prompt = tiny_llama.random_prompt(41, seed=8)
    alone = bench.prefill("alone", prompt, len(prompt))
    assert torch.equal(bench.prefill("chunks", prompt, chunk_tokens), alone)
    bench.prefill("decode", prompt[:-1], chunk_tokens)
    together = bench.logits(
        Row(request_id="other", tokens=tiny_llama.random_prompt(9, seed=9)),
        Row(request_id="decode", tokens=prompt[-1:]),
        Row(request_id="prefill", tokens=prompt),
    )
    assert torch.equal(together[1], alone)
    assert torch.equal(together[2], alone)
