"""Tiny random Gemma 3 checkpoints, written by the reference implementation, and the reference itself."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

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


def save(reference: Gemma3ForCausalLM, directory: Path) -> Path:
    reference.save_pretrained(directory)
    return directory


@torch.inference_mode()
def reference_logits(reference: Gemma3ForCausalLM, tokens: list[int]) -> torch.Tensor:
    """float32[len(tokens), vocab]: the logits after every token, in one pass without a cache."""
    return reference(torch.tensor([tokens]), use_cache=False).logits[0]


@torch.inference_mode()
def reference_greedy(reference: Gemma3ForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
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
