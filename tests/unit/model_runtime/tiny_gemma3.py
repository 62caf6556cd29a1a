"""Tiny random Gemma 3 checkpoints, written by the reference implementation, and the reference itself."""

from __future__ import annotations

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from unit.model_runtime import reference_models
from unit.model_runtime.reference_models import reference_logits, save

__all__ = ["reference_logits", "save"]

VOCAB_SIZE = 131
WINDOW_TOKENS = 11


def make_reference(
    *,
    num_layers: int = 7,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    window_tokens: int = WINDOW_TOKENS,
    intermediate_size: int = 80,
    query_pre_attn_scalar: int = 24,
    tied: bool = True,
    rope_parameters: dict[str, dict[str, object]] | None = None,
    layer_types: list[str] | None = None,
) -> Gemma3ForCausalLM:
    """Six layers of seven slide.

    A wide initialisation and a faint embedding, made up for by the last norm, keep the argmax from being degenerate: in
    a model whose head is its embedding, a strong one lets every token answer with itself.
    """
    torch.manual_seed(7)
    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        query_pre_attn_scalar=query_pre_attn_scalar,
        max_position_embeddings=256,
        sliding_window=window_tokens,
        layer_types=layer_types,
        rope_parameters=rope_parameters,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
    )
    reference = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        # Norm weights are initialised to zero, which would hide a norm that ignores them.
        for name, parameter in reference.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(-0.5, 0.5)
        reference.model.embed_tokens.weight.mul_(0.05)
        reference.model.norm.weight.add_(10.0)
    return reference


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    return reference_models.random_prompt(num_tokens, seed, VOCAB_SIZE)
