"""Every family against the reference implementation on the same random weights: same tokens, logits within 1e-4.

By hand-written plans; `test_family_under_scheduler.py` has the real scheduler, tests/integration/handoff two nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from unit.model_runtime.model_bench import ModelBench
from unit.model_runtime.paged_batches import Row
from unit.model_runtime.reference_models import assert_greedy, random_prompt, reference_logits, save
from unit.model_runtime.tiny_models import TINY_MODELS

from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.kernels.interface import Kernels
from model_runtime.kernels.reference import ReferenceKernels
from model_runtime.registry import cpu_backend

TOLERANCE = 1e-4
BLOCK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A reference model and the same weights here."""

    reference: PreTrainedModel
    checkpoint: Checkpoint

    def bench(self, kernels: Kernels | None = None, kernel_page_size: int = 4) -> ModelBench:
        return ModelBench(self.checkpoint, block_granularity=BLOCK, kernels=kernels, kernel_page_size=kernel_page_size)

    def prompt(self, num_tokens: int, seed: int) -> list[int]:
        return random_prompt(num_tokens, seed, self.checkpoint.config.vocab_size)

    def assert_close(self, ours: torch.Tensor, prompt: list[int]) -> None:
        theirs = reference_logits(self.reference, prompt)[-1]
        assert float((ours - theirs).abs().max()) < TOLERANCE


@pytest.fixture(scope="module", params=TINY_MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    reference = TINY_MODELS[request.param]()
    directory: Path = save(reference, tmp_path_factory.mktemp("model"))
    return Pair(reference=reference, checkpoint=open_checkpoint(directory))


@pytest.mark.parametrize("prompt_tokens", [1, BLOCK, BLOCK + 4, 70])
def test_exact_prefill_logits_for_every_prompt_length(pair: Pair, prompt_tokens: int) -> None:
    prompt = pair.prompt(prompt_tokens, seed=prompt_tokens)
    pair.assert_close(pair.bench().prefill("a", prompt, chunk_tokens=len(prompt)), prompt)


@pytest.mark.parametrize("chunk_tokens", [1, 3, BLOCK, 33])
def test_exact_chunked_prefill_over_scattered_blocks(pair: Pair, chunk_tokens: int) -> None:
    prompt = pair.prompt(41, seed=1)
    pair.assert_close(pair.bench().prefill("a", prompt, chunk_tokens), prompt)


def test_exact_greedy_tokens(pair: Pair) -> None:
    prompt = pair.prompt(13, seed=2)
    tokens = pair.bench().greedy("a", prompt, 40, chunk_tokens=5)
    assert_greedy(pair.reference, prompt, tokens, 40)
    assert len(set(tokens)) > 10, "a degenerate continuation would prove little"


def test_exact_logits_have_the_same_bits_however_a_prompt_is_cut_and_whoever_shares_the_batch(pair: Pair) -> None:
    bench = pair.bench()
    prompt = pair.prompt(41, seed=8)
    alone = bench.prefill("alone", prompt, len(prompt))
    for chunk_tokens in (1, 3, BLOCK, 33):
        assert torch.equal(bench.prefill(f"by {chunk_tokens}", prompt, chunk_tokens), alone)
    bench.prefill("decode", prompt[:-1], 7)
    together = bench.logits(
        Row(request_id="other", tokens=pair.prompt(9, seed=9)),
        Row(request_id="decode", tokens=prompt[-1:]),
        Row(request_id="prefill", tokens=prompt, checkpoint_length=2 * BLOCK),
    )
    assert torch.equal(together[1], alone)
    assert torch.equal(together[2], alone)


def test_exact_logits_have_the_same_bits_with_more_threads(pair: Pair) -> None:
    prompt = pair.prompt(65, seed=5)
    one, three = (pair.bench(cpu_backend(threads).kernels).prefill("a", prompt, 40) for threads in (1, 3))
    assert torch.equal(one, three)


@pytest.mark.parametrize("page_tokens", [1, BLOCK])
def test_exact_logits_for_every_kernel_page_size(pair: Pair, page_tokens: int) -> None:
    prompt = pair.prompt(29, seed=3)
    pair.assert_close(pair.bench(kernel_page_size=page_tokens).prefill("a", prompt, 7), prompt)


def test_exact_on_the_reference_kernels(pair: Pair) -> None:
    prompt = pair.prompt(29, seed=4)
    pair.assert_close(pair.bench(ReferenceKernels()).prefill("a", prompt, 7), prompt)


def test_every_layer_says_once_per_forward_that_it_has_stored(pair: Pair) -> None:
    bench = pair.bench()
    stored: list[int] = []
    bench.on_stored = stored.append
    bench.prefill("a", pair.prompt(11, seed=6), 11)
    assert stored == list(range(pair.checkpoint.config.num_layers))


def test_no_byte_of_the_null_block_is_written(pair: Pair) -> None:
    bench = pair.bench()
    bench.greedy("a", pair.prompt(BLOCK + 3, seed=6), 10, chunk_tokens=4)
    for field in bench.arena.plan.fields:
        assert not bool(bench.arena.field(field.field_id)[0].any())
