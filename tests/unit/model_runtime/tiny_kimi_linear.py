"""Tiny random Kimi Linear checkpoints: delta attention and latent attention in turns, experts behind all but the first.

What makes the family odd: every channel of a key decays by itself, nothing knows its position but through the states,
and a file calls a layer's network by another name than the model.
"""

from __future__ import annotations

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from unit.model_runtime.reference_models import vary_norms

VOCAB_SIZE = 131
SHAPE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_expert_group": 4,
    "topk_group": 2,
    "num_shared_experts": 1,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_reference(**changes: object) -> KimiLinearForCausalLM:
    torch.manual_seed(7)
    reference = KimiLinearForCausalLM(KimiLinearConfig(**(SHAPE | changes))).eval()
    vary_norms(reference, 0.5, 1.5)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("dt_bias"):
                parameter.uniform_(-3.0, 1.0)
            if name.endswith("A_log"):
                parameter.uniform_(-3.0, 0.5)  # slow enough that a state remembers
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)  # zeros would hide a choice that ignores them
    return reference
