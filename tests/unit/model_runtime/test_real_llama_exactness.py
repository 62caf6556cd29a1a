"""The real SmolLM2 weights against the reference implementation's own reading of the same GGUF file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support import prompts
from support.gguf_reading import read_once
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from unit.model_runtime.model_bench import ModelBench
from unit.model_runtime.paged_batches import Row

from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.registry import cpu_backend
from model_runtime.text.tokenizer import load_tokenizer
from model_runtime.weight_choice import WeightChoice
from pdmesh_cli.model_fetch import resolve_model

NUM_THREADS = len(os.sched_getaffinity(0))

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def checkpoint(gguf_path: Path) -> Checkpoint:
    return open_checkpoint(gguf_path)


@pytest.fixture(scope="module")
def reference(gguf_path: Path) -> Iterator[LlamaForCausalLM]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        source = {"gguf_file": gguf_path.name, "dtype": torch.float32}
        with read_once():
            model = AutoModelForCausalLM.from_pretrained(gguf_path.parent, **source)
        yield model.eval()
    torch.set_num_threads(num_threads)


def make_bench(checkpoint: Checkpoint, choice: WeightChoice) -> ModelBench:
    return ModelBench(
        checkpoint,
        memory_bytes=64 << 20,
        block_granularity=64,
        kernel_page_size=16,
        kernels=cpu_backend(NUM_THREADS).kernels,
        weights=choice,
    )


@pytest.fixture(scope="module")
def benches(checkpoint: Checkpoint) -> dict[WeightChoice, ModelBench]:
    return {choice: make_bench(checkpoint, choice) for choice in (WeightChoice.FLOAT32, WeightChoice.QUANTIZED)}


def logits_after_every_token(bench: ModelBench, request_id: str, token_ids: Sequence[int]) -> torch.Tensor:
    """float32[tokens, vocab], the tokens decoded one by one."""
    return torch.cat([bench.logits(Row(request_id=request_id, tokens=[token])) for token in token_ids])


def perplexity(logits: torch.Tensor, token_ids: Sequence[int]) -> float:
    """Of every token but the first, given those before it."""
    chosen = torch.log_softmax(logits[:-1].double(), -1).gather(1, torch.tensor(token_ids[1:])[:, None])
    return math.exp(-float(chosen.mean()))


def test_real_llama_weights_are_exact(checkpoint: Checkpoint, reference: LlamaForCausalLM) -> None:
    for name, expected in reference.state_dict().items():
        if name != "lm_head.weight":  # tied: the file holds it once
            assert torch.equal(checkpoint.load(name), expected), name


@torch.inference_mode()
def test_real_llama_logits_are_exact(
    checkpoint: Checkpoint, reference: LlamaForCausalLM, benches: dict[WeightChoice, ModelBench]
) -> None:
    prompt = torch.randint(3, checkpoint.config.vocab_size, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference(torch.tensor([prompt]), use_cache=False, logits_to_keep=1).logits[0, -1]
    for choice, bench in benches.items():
        logits = bench.prefill("exact", prompt, chunk_tokens=64)
        assert int(logits.argmax()) == int(expected.argmax()), choice
        assert float((logits - expected).abs().max()) < 1e-3, choice


@torch.inference_mode()
def test_real_llama_perplexity_of_a_passage_is_the_references_with_either_weights(
    gguf_path: Path, reference: LlamaForCausalLM, benches: dict[WeightChoice, ModelBench]
) -> None:
    token_ids = load_tokenizer(gguf_path).encode(prompts.STORY)
    expected = perplexity(reference(torch.tensor([token_ids]), use_cache=False).logits[0], token_ids)
    logits = {choice: logits_after_every_token(bench, "story", token_ids) for choice, bench in benches.items()}
    for choice, rows in logits.items():
        assert perplexity(rows, token_ids) == pytest.approx(expected, rel=0.005), choice
    assert torch.equal(logits[WeightChoice.QUANTIZED], logits[WeightChoice.FLOAT32])
    assert expected < 100, "the passage is prose to the model"


def test_real_llama_quantised_weights_take_what_the_file_takes(checkpoint: Checkpoint) -> None:
    kernels = cpu_backend(NUM_THREADS).kernels
    source = checkpoint.source
    ModelBench(checkpoint, kernels=kernels, block_granularity=64, memory_bytes=64 << 20)
    in_file = sum(source.read_blocks(name).nbytes for name, shape in source.shapes.items() if len(shape) > 1)
    # The last panel of a product is filled up with columns that are not there.
    assert in_file <= kernels.num_packed_bytes < 1.01 * in_file
