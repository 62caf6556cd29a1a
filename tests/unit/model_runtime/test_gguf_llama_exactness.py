"""A GGUF file and a safetensors directory of one model give one model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as dequantize_by_package
from gguf.quants import quantize
from unit.model_runtime import tiny_gguf, tiny_llama
from unit.model_runtime.model_bench import ModelBench

from model_runtime.checkpoint import open_checkpoint
from model_runtime.config import RopeFrequencyDivisors
from model_runtime.gguf.dequantize import dequantize

QUANTIZATIONS = [
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q8_0,
]


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_llama_has_the_exact_weights_and_logits_of_its_safetensors_twin(tmp_path: Path, tied: bool) -> None:
    reference = tiny_llama.make_reference(tied=tied)
    from_directory = open_checkpoint(tiny_llama.save(reference, tmp_path / "directory"))
    from_gguf = open_checkpoint(tiny_gguf.write_gguf(tmp_path / "model.gguf", reference))
    assert from_gguf.source.shapes == from_directory.source.shapes
    for name in from_directory.source.shapes:
        assert torch.equal(from_gguf.load(name), from_directory.load(name)), name
    prompt = tiny_llama.random_prompt(19, seed=1)
    logits = ModelBench(from_gguf).prefill("a", prompt, 7)
    assert float((logits - tiny_llama.reference_logits(reference, prompt)[-1]).abs().max()) < 1e-4


def test_gguf_llama_query_rows_are_stored_interleaved_so_that_the_test_above_means_something() -> None:
    reference = tiny_llama.make_reference()
    stored = tiny_gguf.gguf_tensors(reference)["blk.0.attn_q.weight"]
    assert not torch.equal(stored, reference.state_dict()["model.layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=lambda kind: kind.name)
def test_dequantised_blocks_are_the_packages_bit_for_bit(quantization: GGMLQuantizationType) -> None:
    values = np.random.default_rng(0).normal(size=(7, 96)).astype(np.float32)
    packed = quantize(values, quantization)
    ours = dequantize(np.ascontiguousarray(packed).view(np.uint8).reshape(-1), quantization, (7, 96))
    expected = dequantize_by_package(packed, quantization)
    assert np.array_equal(ours.numpy(), expected)
    assert np.abs(expected - values).max() < 0.5, "the blocks hold the values at all"


def test_a_quantised_gguf_llama_loads_what_the_package_reads(tmp_path: Path) -> None:
    reference = tiny_llama.make_reference(num_heads=3, num_kv_heads=1, head_dim=32)
    # Rows must be whole blocks of 32: only the attention output (3 * 32 wide) is stored quantised here.
    tensors = tiny_gguf.gguf_tensors(reference)
    name = "model.layers.0.self_attn.o_proj.weight"
    packed = quantize(tensors["blk.0.attn_output.weight"].numpy(), GGMLQuantizationType.Q8_0)
    expected = dequantize_by_package(packed, GGMLQuantizationType.Q8_0)
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", reference, quantized={"attn_output": GGMLQuantizationType.Q8_0})
    loaded = open_checkpoint(path).load(name)
    assert np.array_equal(loaded.numpy(), expected)
    assert not torch.equal(loaded, reference.state_dict()[name])


def test_gguf_rope_divisors_give_the_exact_llama3_logits(tmp_path: Path) -> None:
    reference = tiny_llama.make_reference(rope_parameters=tiny_llama.LLAMA3_ROPE)
    unscaled = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    tensors = tiny_gguf.gguf_tensors(reference)
    tensors["rope_freqs.weight"] = unscaled / reference.model.rotary_emb.inv_freq
    checkpoint = open_checkpoint(tiny_gguf.write_gguf(tmp_path / "m.gguf", reference, tensors=tensors))
    assert isinstance(checkpoint.config.rope_scaling, RopeFrequencyDivisors)
    assert max(checkpoint.config.rope_scaling.divisors) == pytest.approx(4.0)
    prompt = tiny_llama.random_prompt(90, seed=2)
    logits = ModelBench(checkpoint).prefill("a", prompt, 90)
    assert float((logits - tiny_llama.reference_logits(reference, prompt)[-1]).abs().max()) < 1e-4


def test_the_fingerprint_follows_the_content_and_not_the_name(tmp_path: Path) -> None:
    reference = tiny_llama.make_reference()
    first = tiny_gguf.write_gguf(tmp_path / "first.gguf", reference)
    second = tmp_path / "second.gguf"
    second.write_bytes(first.read_bytes())
    assert open_checkpoint(first).fingerprint == open_checkpoint(second).fingerprint
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    assert open_checkpoint(first).fingerprint != open_checkpoint(second).fingerprint
    assert len(open_checkpoint(first).fingerprint) == 64
