"""Running and saving models of the reference implementation, whatever their family."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel


def save(reference: PreTrainedModel, directory: Path, *, max_shard_size: str = "1GB") -> Path:
    reference.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@torch.inference_mode()
def reference_logits(reference: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """float32[len(tokens), vocab]: the logits after every token, in one pass without a cache."""
    logits: torch.Tensor = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_greedy(reference: PreTrainedModel, prompt: list[int], answer: list[int], num_tokens: int) -> None:
    """The answer is the reference's own greedy one, token for token.

    Read in one pass: each token is the likeliest one behind the prompt and what of the answer comes before it.
    """
    assert len(answer) == num_tokens
    choices = reference_logits(reference, [*prompt, *answer[:-1]])[len(prompt) - 1 :].argmax(-1)
    assert answer == choices.tolist()


@torch.inference_mode()
def reference_greedy(reference: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by hand over the reference's own cache."""
    cache = DynamicCache(config=reference.config)
    fed, tokens = prompt, list(prompt)
    for _ in range(num_tokens):
        begin = len(tokens) - len(fed)
        # Named, because some models count from zero in every call without them.
        position_ids = torch.arange(begin, len(tokens))[None]
        logits = reference(torch.tensor([fed]), cache=cache, use_cache=True, position_ids=position_ids).logits[0, -1]
        fed = [int(logits.argmax())]
        tokens += fed
    return tokens[len(prompt) :]


def random_prompt(num_tokens: int, seed: int, vocab_size: int) -> list[int]:
    """Without the first three ids, which are special ones as a rule."""
    generator = torch.Generator().manual_seed(seed)
    prompt: list[int] = torch.randint(3, vocab_size, (num_tokens,), generator=generator).tolist()
    return prompt


@torch.no_grad()
def vary_norms(reference: PreTrainedModel, low: float, high: float) -> None:
    """Norm weights are initialised to a constant, which would hide a norm that ignores them."""
    for name, parameter in reference.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(low, high)
