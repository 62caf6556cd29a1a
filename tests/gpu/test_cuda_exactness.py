"""Models on a CUDA device generate what they generate on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.model_runtime import tiny_gemma3, tiny_gguf, tiny_llama
from unit.model_runtime.fused_run import FusedRun
from unit.model_runtime.reference_models import random_prompt, save
from unit.model_runtime.tiny_models import TINY_MODELS

from cache_runtime.device import CpuDevice, CudaDevice, Device
from model_runtime.checkpoint import Checkpoint, open_checkpoint
from model_runtime.executor import ModelExecutor

GRAIN = 8
FAMILIES = {"llama": tiny_llama.make_reference, "gemma": tiny_gemma3.make_reference, **TINY_MODELS}


def make_run(checkpoint: Checkpoint, device: Device) -> FusedRun:
    executor = ModelExecutor(
        checkpoint,
        memory_bytes=8 << 20,
        prefix_granularity=GRAIN,
        kernel_page_size=4,
        num_threads=1,
        device=device,
    )
    assert executor.arena.device is device
    return FusedRun(executor)


def assert_same_tokens(checkpoint: Checkpoint, device: CudaDevice) -> None:
    prompts = {
        f"{num} tokens": random_prompt(num, seed=num, vocab_size=checkpoint.config.vocab_size)
        for num in (1, GRAIN - 1, GRAIN, 37)
    }
    on_cuda, on_cpu = (make_run(checkpoint, each).generate(prompts, 12) for each in (device, CpuDevice()))
    assert on_cuda == on_cpu


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_generates_the_exact_tokens_of_the_cpu(family: str, device: CudaDevice, tmp_path: Path) -> None:
    assert_same_tokens(open_checkpoint(save(FAMILIES[family](), tmp_path)), device)


def test_quantised_llama_weights_generate_the_exact_tokens_of_the_cpu(device: CudaDevice, tmp_path: Path) -> None:
    path = tiny_gguf.write_gguf(tmp_path / "model.gguf", tiny_llama.make_reference())
    assert_same_tokens(open_checkpoint(path), device)
