"""A hand-written loop over transformers, float32. Arguments: MODEL NUM_THREADS."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from protocol import prompt, serve
from transformers import AutoModelForCausalLM, DynamicCache


class TransformersEngine:
    def __init__(self, model: Path, num_threads: int, _: list[str]) -> None:
        torch.set_num_threads(num_threads)
        self.facts: Mapping[str, float] = {}
        source = {"gguf_file": model.name} if model.is_file() else {}
        folder = model.parent if model.is_file() else model
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)

    @torch.inference_mode()
    def prefill(self, num_tokens: int) -> float:
        began = time.perf_counter()
        self._first_tokens(1, num_tokens)
        return time.perf_counter() - began

    @torch.inference_mode()
    def decode(self, batch_size: int, context_tokens: int, num_steps: int) -> float:
        tokens, cache = self._first_tokens(batch_size, context_tokens)
        began = time.perf_counter()
        for step in range(num_steps):
            positions = torch.full_like(tokens, context_tokens + step)
            output = self._model(input_ids=tokens, position_ids=positions, cache=cache, use_cache=True)
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        return (time.perf_counter() - began) / num_steps

    @torch.inference_mode()
    def score(self, tokens: list[int]) -> float:
        logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
        return float(torch.nn.functional.cross_entropy(logits.double(), torch.tensor(tokens[1:])))

    def _first_tokens(self, batch_size: int, num_tokens: int) -> tuple[torch.Tensor, DynamicCache]:
        """int64[batch, 1] after prompts of their own, and the cache behind them."""
        inputs = torch.tensor([prompt(number, num_tokens) for number in range(batch_size)])
        output = self._model(input_ids=inputs, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values


if __name__ == "__main__":
    serve(TransformersEngine)
