"""Tiny random Llama checkpoints, written by the reference implementation, and the reference itself."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 131
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_reference(
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    tied: bool = True,
    rope_parameters: dict[str, object] | None = None,
    num_layers: int = 2,
    hidden_size: int = 48,
    intermediate_size: int = 80,
) -> LlamaForCausalLM:
    """A wide initialisation keeps the argmax from being degenerate."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters=rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    )
    reference = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # Norm weights are initialised to one, which would hide a norm that ignores them.
        for name, parameter in reference.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return reference


def save(reference: LlamaForCausalLM, directory: Path, *, max_shard_size: str = "1GB") -> Path:
    reference.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@torch.inference_mode()
def reference_logits(reference: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """float32[len(tokens), vocab]: the logits after every token, in one pass without a cache."""
    return reference(torch.tensor([tokens]), use_cache=False).logits[0]


@torch.inference_mode()
def reference_greedy(reference: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by hand over the reference's own cache."""
    cache = DynamicCache(config=reference.config)
    fed, tokens = prompt, list(prompt)
    for _ in range(num_tokens):
        begin = len(tokens) - len(fed)
        position_ids = torch.arange(begin, len(tokens))[None]
        logits = reference(torch.tensor([fed]), cache=cache, use_cache=True, position_ids=position_ids).logits[0, -1]
        fed = [int(logits.argmax())]
        tokens += fed
    return tokens[len(prompt) :]


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
