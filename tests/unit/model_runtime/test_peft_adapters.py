"""Adapters that PEFT itself made and saved, against PEFT on the reference model: same greedy tokens.

Skipped where PEFT is not installed; `test_adapter_exactness.py` holds the rest without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_adapters import TARGETS
from unit.model_runtime import tiny_llama
from unit.model_runtime.fused_run import FusedRun
from unit.model_runtime.reference_models import assert_greedy, random_prompt, save

from model_runtime.checkpoint import open_checkpoint
from model_runtime.executor import ModelExecutor
from model_runtime.lora.peft_files import open_adapter

peft = pytest.importorskip("peft", reason="peft is not installed")


@pytest.mark.parametrize("use_rslora", [False, True])
def test_exact_llama_with_an_adapter_that_peft_saved(use_rslora: bool, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tiny_llama.make_reference(), tmp_path / "model"))
    config = peft.LoraConfig(
        r=4, lora_alpha=8, use_rslora=use_rslora, target_modules=list(TARGETS["llama"]), lora_dropout=0.1
    )
    adapted = peft.get_peft_model(tiny_llama.make_reference(), config).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.15)
    adapted.save_pretrained(tmp_path / "adapter")
    executor = ModelExecutor(
        checkpoint,
        memory_bytes=2 << 20,
        prefix_granularity=8,
        kernel_page_size=4,
        num_threads=1,
        adapters=(open_adapter("mine", tmp_path / "adapter", checkpoint.source),),
    )
    prompts = {"a": random_prompt(19, 3, tiny_llama.VOCAB_SIZE)}
    generated = FusedRun(executor).generate(prompts, 16, adapters={"a": "mine"})
    assert len(set(generated["a"])) > 5
    assert_greedy(adapted, prompts["a"], generated["a"], 16)
