"""The real Gemma 3 weights against the reference implementation's own reading of the same GGUF file.

The weights have terms of their own, so no test fetches them: `pdmesh demo --model gemma3` does, for who wants it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from unit.model_runtime.model_bench import ModelBench

from model_runtime.checkpoint import open_checkpoint
from model_runtime.registry import cpu_backend
from model_runtime.text.tokenizer import load_tokenizer
from pdmesh_cli.model_fetch import default_cache_dir, find_packaged

NUM_THREADS = len(os.sched_getaffinity(0))


@pytest.fixture
def gguf_path() -> Path:
    model = find_packaged("gemma3")
    assert model is not None
    path = default_cache_dir() / model.alias / model.file_name
    if not path.is_file():
        pytest.skip("the gemma3 weights are not on this machine")
    return path


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_exact_real_gemma3_greedy_text(gguf_path: Path) -> None:
    """The expected text is that of transformers 5.24 in float32 on the same file."""
    tokenizer = load_tokenizer(gguf_path)
    bench = ModelBench(
        open_checkpoint(gguf_path),
        memory_bytes=256 << 20,
        block_granularity=64,
        kernel_page_size=16,
        kernels=cpu_backend(NUM_THREADS).kernels,
    )
    for prompt, expected in {
        "The capital of France is": " the capital of the country of France. It is the largest city in France and the "
        "second largest city in Europe",
        "Once upon a time": ", there was a little girl named Lily. She was a very smart girl, and she loved to play "
        "with her friends",
    }.items():
        token_ids = tokenizer.encode(prompt, add_special=True)
        assert token_ids[0] == 2, "the model expects a begin of sequence"
        tokens = bench.greedy(prompt, token_ids, len(tokenizer.encode(expected)), chunk_tokens=64)
        assert tokenizer.decode(tokens) == expected


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_exact_real_gemma3_logits_past_the_window(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reference = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    ).eval()
    checkpoint = open_checkpoint(gguf_path)
    prompt = [2, *torch.randint(3, 200_000, (699,), generator=torch.Generator().manual_seed(1)).tolist()]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt]), use_cache=False, logits_to_keep=1).logits[0, -1]
    bench = ModelBench(
        checkpoint,
        memory_bytes=256 << 20,
        block_granularity=64,
        kernel_page_size=16,
        kernels=cpu_backend(NUM_THREADS).kernels,
    )
    logits = bench.prefill("a", prompt, chunk_tokens=256)
    assert int(logits.argmax()) == int(expected.argmax())
    assert float((logits - expected).abs().max()) < 2e-3
