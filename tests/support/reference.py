"""The reference implementation: transformers on the same GGUF file, float32, greedy, one prompt at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# A tie nearer than this may flip between two correct float32 implementations.
TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Step:
    token_id: int
    logits: torch.Tensor  # [vocab]


class Reference:
    def __init__(self, gguf_path: Path) -> None:
        source = {"gguf_file": gguf_path.name}
        self.tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, **source)
        self.model = AutoModelForCausalLM.from_pretrained(gguf_path.parent, dtype=torch.float32, **source).eval()

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[Step]:
        """The next `num_tokens` tokens with the logits each was chosen from."""
        steps: list[Step] = []
        inputs, cache, position = list(token_ids), None, 0
        while len(steps) < num_tokens:
            positions = torch.arange(position, position + len(inputs))[None]
            output = self.model(
                input_ids=torch.tensor([inputs]), position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1
            )
            cache, position = output.past_key_values, position + len(inputs)
            logits = output.logits[0, -1]
            steps.append(Step(int(logits.argmax()), logits))
            inputs = [steps[-1].token_id]
        return steps


def assert_same_greedy_tokens(
    reference: Sequence[Step], tokens: Sequence[int], logprobs: Sequence[float], name: str
) -> None:
    """Equal token for token, up to a proven near tie.

    At the first difference both candidates' reference logits must lie within TIE of each other and our log-probability
    within TIE of the reference's; what follows a flip is another text and is not compared.
    """
    for position, (step, token_id) in enumerate(zip(reference, tokens, strict=True)):
        expected = torch.log_softmax(step.logits.double(), -1)
        if token_id == step.token_id:
            assert abs(float(expected[token_id]) - logprobs[position]) < TIE, f"{name}: log-probability at {position}"
            continue
        gap = float(step.logits[step.token_id] - step.logits[token_id])
        assert gap < TIE, f"{name}: token {position} is {token_id}, reference {step.token_id}, logits apart by {gap}"
        assert abs(float(expected[token_id]) - logprobs[position]) < TIE
        return
