"""The real SmolLM2 weights against the reference implementation's own reading of the same GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from unit.model_runtime.model_bench import ModelBench

from model_runtime.checkpoint import open_checkpoint
from model_runtime.registry import cpu_backend
from pdmesh_cli.model_fetch import resolve_model

NUM_THREADS = len(os.sched_getaffinity(0))


@pytest.fixture
def gguf_path() -> Path:
    return resolve_model("smollm2")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.real_model
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("offline")
def test_real_llama_weights_and_logits_are_exact(gguf_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    ).eval()
    checkpoint = open_checkpoint(gguf_path)
    for name, expected in reference.state_dict().items():
        if name != "lm_head.weight":  # tied: the file holds it once
            assert torch.equal(checkpoint.load(name), expected), name
    prompt = torch.randint(3, checkpoint.config.vocab_size, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected_logits = reference(torch.tensor([prompt]), use_cache=False, logits_to_keep=1).logits[0, -1]
    bench = ModelBench(
        checkpoint,
        memory_bytes=64 << 20,
        block_granularity=64,
        kernel_page_size=16,
        kernels=cpu_backend(NUM_THREADS).kernels,
    )
    logits = bench.prefill("a", prompt, chunk_tokens=64)
    assert int(logits.argmax()) == int(expected_logits.argmax())
    assert float((logits - expected_logits).abs().max()) < 1e-3
