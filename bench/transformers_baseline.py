"""Measures transformers on the same weights: a hand-written loop, and `generate()`. One JSON object per line.

Runs as a process of its own, so that its threads and memory do not disturb what it is compared with.
Usage: transformers_baseline.py GGUF NUM_THREADS PROMPT_TOKENS NUM_TOKENS BATCH_SIZE...
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model


def prompt_batch(batch_size: int, num_tokens: int) -> torch.Tensor:
    """int64 [batch, tokens], ordinary tokens."""
    return torch.arange(batch_size * num_tokens).remainder(20_000).add(100).view(batch_size, num_tokens)


@torch.inference_mode()
def hand_loop(model: PreTrainedModel, inputs: torch.Tensor, num_tokens: int) -> tuple[float, float]:
    """Seconds to the first token of a batch, and for each token after it."""
    started = time.perf_counter()
    output = model(input_ids=inputs, use_cache=True, logits_to_keep=1)
    tokens = output.logits[:, -1].argmax(-1, keepdim=True)
    first = time.perf_counter()
    for step in range(num_tokens - 1):
        positions = torch.full_like(tokens, inputs.shape[1] + step)
        output = model(input_ids=tokens, position_ids=positions, cache=output.past_key_values, use_cache=True)
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
    return first - started, (time.perf_counter() - first) / (num_tokens - 1)


@torch.inference_mode()
def library_loop(model: PreTrainedModel, inputs: torch.Tensor, num_tokens: int) -> float:
    """Seconds for each token of `generate()`, the prompt left out by a second, one-token run."""

    # Declared as a tensor, as every attribute of a module is.
    generate = cast("Callable[..., torch.Tensor]", model.generate)

    def run(count: int) -> float:
        started = time.perf_counter()
        generate(inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=2)
        return time.perf_counter() - started

    one = run(1)
    return (run(num_tokens) - one) / (num_tokens - 1)


def main() -> None:
    path, num_threads, prompt_tokens, num_tokens, *batch_sizes = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    model = load(Path(path))
    hand_loop(model, prompt_batch(1, 16), 4)
    for batch_size in map(int, batch_sizes):
        inputs = prompt_batch(batch_size, int(prompt_tokens))
        first_s, token_s = min(hand_loop(model, inputs, int(num_tokens)) for _ in range(2))
        row = {"batch_size": batch_size, "first_token_s": first_s, "token_s": token_s}
        print(json.dumps({**row, "generate_token_s": library_loop(model, inputs, int(num_tokens))}), flush=True)


if __name__ == "__main__":
    main()
