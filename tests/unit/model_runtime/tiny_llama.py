"""Tiny random Llama checkpoints, written by the reference implementation, and the reference itself."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from unit.model_runtime import reference_models
from unit.model_runtime.reference_models import reference_greedy, reference_logits, save

__all__ = ["reference_greedy", "reference_logits", "save"]

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
    vocab_size: int = VOCAB_SIZE,
) -> LlamaForCausalLM:
    """A wide initialisation keeps the argmax from being degenerate."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocab_size,
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


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    return reference_models.random_prompt(num_tokens, seed, VOCAB_SIZE)
