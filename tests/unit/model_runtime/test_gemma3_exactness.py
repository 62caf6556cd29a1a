"""Our Gemma 3 against the reference implementation on the same random weights: same tokens, logits within 1e-4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM
from unit.model_runtime import tiny_gemma3
from unit.model_runtime.model_bench import ModelBench
from unit.model_runtime.paged_batches import Row
from unit.model_runtime.reference_models import assert_greedy

from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.kernels.reference import ReferenceKernels

TOLERANCE = 1e-4
BLOCK = 8

Pair = tuple[Gemma3ForCausalLM, ModelBench]
LINEAR_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}
VARIANTS: dict[str, dict[str, object]] = {
    "grouped query": {"num_heads": 6, "num_kv_heads": 2},
    "one key head": {"num_heads": 4, "num_kv_heads": 1},
    "untied head": {"tied": False},
    "head wider than a vector": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 72},
    "window shorter than a block": {"window_tokens": 3},
    "window of whole blocks": {"window_tokens": 2 * BLOCK},
    "window that nothing leaves": {"window_tokens": 200},
    "rotary bases of its own": {"rope_parameters": LINEAR_ROPE},
    "full layers first": {"num_layers": 3, "layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    "odd feed-forward width": {"intermediate_size": 77},
}


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS.keys())
def variant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Gemma3ForCausalLM, Checkpoint]:
    reference = tiny_gemma3.make_reference(**request.param)
    return reference, open_checkpoint(tiny_gemma3.save(reference, tmp_path_factory.mktemp("variant")))


@pytest.fixture
def pair(variant: tuple[Gemma3ForCausalLM, Checkpoint]) -> Pair:
    reference, checkpoint = variant
    return reference, ModelBench(checkpoint, block_granularity=BLOCK)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).abs().max()) < TOLERANCE


@pytest.mark.parametrize("prompt_tokens", [1, BLOCK, tiny_gemma3.WINDOW_TOKENS, BLOCK + 4, 70])
def test_exact_gemma3_prefill_logits_for_every_prompt_length(pair: Pair, prompt_tokens: int) -> None:
    reference, bench = pair
    prompt = tiny_gemma3.random_prompt(prompt_tokens, seed=prompt_tokens)
    expected = tiny_gemma3.reference_logits(reference, prompt)[-1]
    assert close(bench.prefill("a", prompt, chunk_tokens=len(prompt)), expected)


@pytest.mark.parametrize("chunk_tokens", [1, 3, BLOCK, 33])
def test_exact_gemma3_chunked_prefill_over_tables_with_holes(pair: Pair, chunk_tokens: int) -> None:
    reference, bench = pair
    prompt = tiny_gemma3.random_prompt(41, seed=1)
    expected = tiny_gemma3.reference_logits(reference, prompt)[-1]
    assert close(bench.prefill("a", prompt, chunk_tokens), expected)


def test_exact_gemma3_greedy_tokens_while_the_window_slides_past_the_prompt(pair: Pair) -> None:
    reference, bench = pair
    prompt = tiny_gemma3.random_prompt(13, seed=2)
    tokens = bench.greedy("a", prompt, 40, chunk_tokens=5)
    assert_greedy(reference, prompt, tokens, 40)
    assert len(set(tokens)) > 5, "a degenerate continuation would prove little"


def test_exact_gemma3_logits_have_the_same_bits_however_a_prompt_is_cut_and_whoever_shares_the_batch(
    pair: Pair,
) -> None:
    _, bench = pair
    prompt = tiny_gemma3.random_prompt(41, seed=8)
    alone = bench.prefill("alone", prompt, len(prompt))
    for chunk_tokens in (1, 3, BLOCK, 33):
        assert torch.equal(bench.prefill(f"by {chunk_tokens}", prompt, chunk_tokens), alone)
    bench.prefill("decode", prompt[:-1], 7)
    together = bench.logits(
        Row(request_id="other", tokens=tiny_gemma3.random_prompt(9, seed=9)),
        Row(request_id="decode", tokens=prompt[-1:]),
        Row(request_id="prefill", tokens=prompt),
    )
    assert torch.equal(together[1], alone)
    assert torch.equal(together[2], alone)


@pytest.mark.parametrize("page_tokens", [1, 2, 8])
def test_exact_gemma3_logits_for_every_kernel_page_size(tmp_path: Path, page_tokens: int) -> None:
    reference = tiny_gemma3.make_reference()
    bench = ModelBench(open_checkpoint(tiny_gemma3.save(reference, tmp_path)), kernel_page_size=page_tokens)
    prompt = tiny_gemma3.random_prompt(29, seed=3)
    assert close(bench.prefill("a", prompt, 7), tiny_gemma3.reference_logits(reference, prompt)[-1])


def test_exact_gemma3_on_the_reference_kernels(tmp_path: Path) -> None:
    reference = tiny_gemma3.make_reference()
    bench = ModelBench(open_checkpoint(tiny_gemma3.save(reference, tmp_path)), kernels=ReferenceKernels())
    prompt = tiny_gemma3.random_prompt(29, seed=4)
    assert close(bench.prefill("a", prompt, 7), tiny_gemma3.reference_logits(reference, prompt)[-1])


def test_sliding_layers_share_planes_here_so_that_the_tests_above_mean_something(tmp_path: Path) -> None:
    bench = ModelBench(open_checkpoint(tiny_gemma3.save(tiny_gemma3.make_reference(), tmp_path)))
    contract = bench.arena.contract
    assert set(contract.group_ids) == {"sliding", "full"}
    assert contract.group("sliding").block_stride_rows == 6 * BLOCK
    assert contract.group("full").block_stride_rows == BLOCK


def test_gemma3_writes_no_cache_row_outside_its_requests_blocks(tmp_path: Path) -> None:
    bench = ModelBench(
        open_checkpoint(tiny_gemma3.save(tiny_gemma3.make_reference(), tmp_path)), block_granularity=BLOCK
    )
    bench.prefill("a", tiny_gemma3.random_prompt(BLOCK + 3, seed=6), 4)
    # By address, because the groups' blocks take turns with the same bytes.
    written: set[int] = set()
    for field in bench.arena.plan.fields:
        blocks = bench.arena.field(field.field_id)
        assert not bool(blocks[0].any()), "the null block stays clear"
        for block, row in blocks.flatten(2).any(dim=2).nonzero().tolist():
            written.add(blocks[block, row].data_ptr())
    assert len(written) == (BLOCK + 3) * len(bench.arena.plan.fields)
