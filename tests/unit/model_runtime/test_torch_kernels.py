"""The kernels for any device, on the CPU: every family computes with them what it computes with the native ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from unit.model_runtime import tiny_gemma3, tiny_gguf, tiny_llama
from unit.model_runtime.model_bench import ModelBench
from unit.model_runtime.reference_models import random_prompt, save
from unit.model_runtime.tiny_models import TINY_MODELS

from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.registry import cpu_backend, find_backend, torch_backend

CPU = torch.device("cpu")
FAMILIES = {"llama": tiny_llama.make_reference, "gemma": tiny_gemma3.make_reference, **TINY_MODELS}
TOLERANCE = 1e-4


def make_bench(checkpoint: Checkpoint, *, is_native: bool) -> ModelBench:
    return ModelBench(checkpoint, kernels=(cpu_backend(1) if is_native else torch_backend(CPU)).kernels)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_on_torch_kernels_is_the_one_on_native_kernels(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(FAMILIES[family](), tmp_path))
    prompt = random_prompt(21, seed=5, vocab_size=checkpoint.config.vocab_size)
    native, plain = (make_bench(checkpoint, is_native=is_native) for is_native in (True, False))
    expected, logits = native.prefill("a", prompt, 7), plain.prefill("a", prompt, 7)
    assert torch.allclose(logits, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))
    assert not torch.equal(logits, expected), "other kernels than the native ones"
    assert plain.greedy("b", prompt, 12, 7) == native.greedy("b", prompt, 12, 7)


def test_quantised_weights_are_expanded(tmp_path: Path) -> None:
    path = tiny_gguf.write_gguf(tmp_path / "model.gguf", tiny_llama.make_reference())
    kernels = torch_backend(CPU).kernels
    ModelBench(open_checkpoint(path), kernels=kernels)
    assert kernels.quantizations == ()
    assert kernels.num_packed_bytes > 0


def test_only_the_native_kernels_promise_batch_invariance() -> None:
    assert cpu_backend(1).is_batch_invariant
    assert not torch_backend(CPU).is_batch_invariant
    assert find_backend(CPU, 1).is_batch_invariant
    assert not find_backend(torch.device("cuda", 0), 1).is_batch_invariant
