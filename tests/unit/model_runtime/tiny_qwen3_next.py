"""Tiny random Qwen3-Next checkpoints: delta nets and gated attention in turns, experts behind all layers but one.

What makes the family odd: projections are stored by key head, heads turn in part, most norms are stored as their
distance from one, and the state has no token axis.
"""

from __future__ import annotations

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from unit.model_runtime.reference_models import vary_norms

VOCAB_SIZE = 131
SHAPE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
    "mlp_only_layers": [1],
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}


def make_reference(**changes: object) -> Qwen3NextForCausalLM:
    """Half of a head turns, by angles that differ much between neighbours."""
    torch.manual_seed(7)
    reference = Qwen3NextForCausalLM(Qwen3NextConfig(**(SHAPE | changes))).eval()
    vary_norms(reference, -0.5, 0.5)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("dt_bias"):
                parameter.uniform_(-3.0, 1.0)  # ones would hide heads that swap their biases
            if name.endswith("A_log"):
                parameter.uniform_(-3.0, 0.5)  # slow enough that a state remembers
            if name.endswith("linear_attn.norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return reference
