"""A model whose weights stay quantised in memory is the float32 model that its file stands for, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from unit.model_runtime import tiny_gguf, tiny_llama
from unit.model_runtime.model_bench import ModelBench
from unit.model_runtime.paged_batches import Row

from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.errors import CheckpointError, UnsupportedWeightsError
from model_runtime.executor import ModelExecutor
from model_runtime.registry import cpu_backend
from model_runtime.weight_choice import WeightChoice

Q4_1, Q5_0, Q5_1, Q8_0 = (
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
)
ALL_LINEAR = {name: Q4_1 for name in tiny_gguf.LAYER_NAMES.values() if not name.endswith("norm")}
EVERYTHING = {**ALL_LINEAR, "token_embd": Q8_0, "output": Q8_0}
# Query, key and value, which are one product, of three kinds; gate and up, another product, half plain.
MIXED = {"attn_q": Q4_1, "attn_k": Q8_0, "attn_v": Q5_0, "ffn_up": Q8_0, "token_embd": Q4_1}
PROMPT = tiny_llama.random_prompt(41, seed=3)


def quantized_checkpoint(
    folder: Path, quantized: Mapping[str, GGMLQuantizationType] = EVERYTHING, *, tied: bool = True
) -> Checkpoint:
    reference = tiny_llama.make_reference(hidden_size=64, intermediate_size=96, tied=tied)
    return open_checkpoint(tiny_gguf.write_gguf(folder / "model.gguf", reference, quantized=quantized))


def benches(checkpoint: Checkpoint, *, num_threads: int = 1) -> tuple[ModelBench, ModelBench]:
    """The model with float32 weights, and with those the file has."""
    float32, auto = (
        ModelBench(checkpoint, weights=choice, kernels=cpu_backend(num_threads).kernels)
        for choice in (WeightChoice.FLOAT32, WeightChoice.AUTO)
    )
    return float32, auto


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantized", [EVERYTHING, ALL_LINEAR, MIXED], ids=["all", "linear", "mixed"])
def test_prefill_and_decode_give_the_float32_models_bits(
    tmp_path: Path, quantized: Mapping[str, GGMLQuantizationType], tied: bool
) -> None:
    float32, auto = benches(quantized_checkpoint(tmp_path, quantized, tied=tied))
    assert torch.equal(auto.prefill("a", PROMPT, 16), float32.prefill("a", PROMPT, 16))
    assert auto.greedy("b", PROMPT[:9], 20, 9) == float32.greedy("b", PROMPT[:9], 20, 9)


def test_quantised_weights_are_really_used(tmp_path: Path) -> None:
    checkpoint = quantized_checkpoint(tmp_path)
    plain = tiny_llama.make_reference(hidden_size=64, intermediate_size=96)
    logits = ModelBench(checkpoint).prefill("a", PROMPT, 16)
    difference = (logits - tiny_llama.reference_logits(plain, PROMPT)[-1]).abs().max()
    assert 1e-3 < float(difference) < 10, "what was rounded to four bits is near what it was, and not the same"


def test_a_request_gets_the_same_bits_alone_in_a_batch_in_chunks_and_with_more_threads(tmp_path: Path) -> None:
    checkpoint = quantized_checkpoint(tmp_path)
    prompts = {f"r{index}": tiny_llama.random_prompt(5 + 9 * index, seed=index) for index in range(5)}
    alone = {name: ModelBench(checkpoint).greedy(name, prompt, 4, len(prompt)) for name, prompt in prompts.items()}
    for chunk_tokens, num_threads in ((3, 1), (16, 3), (64, 2)):
        bench = ModelBench(checkpoint, kernels=cpu_backend(num_threads).kernels)
        expected = {name: ModelBench(checkpoint).prefill(name, prompt, 64) for name, prompt in prompts.items()}
        for name, prompt in prompts.items():
            assert torch.equal(bench.prefill(name, prompt, chunk_tokens), expected[name]), (name, chunk_tokens)
        tokens = {name: [int(expected[name].argmax())] for name in prompts}
        for _ in range(3):
            logits = bench.logits(*(Row(request_id=name, tokens=tokens[name][-1:]) for name in prompts))
            for name, row in zip(prompts, logits, strict=True):
                tokens[name].append(int(row.argmax()))
        assert tokens == alone


def make_executor(checkpoint: Checkpoint, weights: WeightChoice) -> ModelExecutor:
    return ModelExecutor(checkpoint, memory_bytes=1 << 20, prefix_granularity=16, num_threads=1, weights=weights)


def test_the_executor_says_what_its_weights_take(tmp_path: Path) -> None:
    checkpoint = quantized_checkpoint(tmp_path)
    float32 = make_executor(checkpoint, WeightChoice.FLOAT32).weights
    assert float32.formats == ("float32",)
    assert float32.num_bytes >= float32.float32_bytes, "float32 is itself, but for the padding of the last columns"
    for choice in (WeightChoice.AUTO, WeightChoice.QUANTIZED):
        quantized = make_executor(checkpoint, choice).weights
        assert quantized.formats == ("Q4_1", "Q8_0")
        assert quantized.float32_bytes == float32.float32_bytes
        assert quantized.num_bytes < 0.3 * float32.num_bytes


def test_auto_takes_what_it_can_keep_quantised_and_the_rest_in_float32(tmp_path: Path) -> None:
    checkpoint = quantized_checkpoint(tmp_path, {**MIXED, "ffn_down": Q5_1})
    assert make_executor(checkpoint, WeightChoice.AUTO).weights.formats == ("Q4_1", "Q5_0", "Q8_0", "float32")


@pytest.mark.parametrize(
    ("quantized", "message"),
    [
        ({**EVERYTHING, "ffn_down": Q5_1}, r'"blk.0.ffn_down.weight" is Q5_1, weights "quantized" needs one of Q4_0'),
        ({}, r'"token_embd.weight" is not quantised, weights "quantized" needs'),
    ],
)
def test_quantised_weights_are_refused_for_a_file_that_has_none(
    tmp_path: Path, quantized: Mapping[str, GGMLQuantizationType], message: str
) -> None:
    with pytest.raises(UnsupportedWeightsError, match=message):
        make_executor(quantized_checkpoint(tmp_path, quantized), WeightChoice.QUANTIZED)


def test_a_safetensors_directory_is_float32_whatever_is_preferred(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama.save(tiny_llama.make_reference(), tmp_path))
    assert make_executor(checkpoint, WeightChoice.AUTO).weights.formats == ("float32",)
    with pytest.raises(UnsupportedWeightsError, match="not quantised"):
        make_executor(checkpoint, WeightChoice.QUANTIZED)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_blocks_whose_scale_is_no_number_name_their_tensor(tmp_path: Path) -> None:
    reference = tiny_llama.make_reference(hidden_size=64, intermediate_size=96)
    tensors = tiny_gguf.gguf_tensors(reference)
    tensors["blk.1.ffn_down.weight"][3, 5] = float("inf")
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", reference, quantized=EVERYTHING, tensors=tensors)
    with pytest.raises(CheckpointError, match=r'"blk.1.ffn_down.weight" cannot be read: .* row 3 .* not finite'):
        ModelBench(open_checkpoint(path))
