"""The reference implementation: transformers on the same GGUF file, float32, one prompt at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.gguf_reading import read_once

# A tie nearer than this may flip between two correct float32 implementations.
TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Step:
    token_id: int
    logits: torch.Tensor  # [vocab]


class Reference:
    def __init__(self, gguf_path: Path) -> None:
        source = {"gguf_file": gguf_path.name}
        with read_once():
            self.tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, **source)
            self.model = AutoModelForCausalLM.from_pretrained(gguf_path.parent, dtype=torch.float32, **source).eval()

    @torch.inference_mode()
    def choices_along(self, prompt: Sequence[int], answer: Sequence[int]) -> list[Step]:
        """Its choice behind the prompt and each beginning of the answer, the whole answer excepted.

        One pass over all of them: while the answer is what it would have chosen itself, these are the steps of its own
        greedy run.
        """
        inputs = torch.tensor([[*prompt, *answer[:-1]]])
        logits = self.model(input_ids=inputs, use_cache=False, logits_to_keep=len(answer)).logits[0]
        return [Step(int(row.argmax()), row) for row in logits]


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
