"""Tiny random DeepSeek checkpoints: V3 with grouped sigmoid experts and YaRN, V2 without compressed queries."""

from __future__ import annotations

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    PreTrainedModel,
)
from unit.model_runtime.reference_models import vary_norms

VOCAB_SIZE = 131
NUM_SELECTED = 11
SHAPE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}


def make_v3(**changes: object) -> DeepseekV3ForCausalLM:
    torch.manual_seed(7)
    shape = SHAPE | {"q_lora_rank": 28, "n_shared_experts": 1, "rope_parameters": YARN} | changes
    reference = DeepseekV3ForCausalLM(DeepseekV3Config(**shape)).eval()
    vary_norms(reference, 0.5, 1.5)
    _vary_choice_biases(reference)
    return reference


def make_sparse(**changes: object) -> DeepseekV32ForCausalLM:
    """V3.2: a token attends to eleven rows. Many index heads, so that few rows are worth the same."""
    torch.manual_seed(7)
    index = {"index_n_heads": 32, "index_head_dim": 20, "index_topk": NUM_SELECTED}
    shape = SHAPE | {"q_lora_rank": 28, "n_shared_experts": 1, "rope_parameters": YARN} | index | changes
    reference = DeepseekV32ForCausalLM(DeepseekV32Config(**shape)).eval()
    vary_norms(reference, 0.5, 1.5)
    _vary_choice_biases(reference)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("k_norm.bias"):
                parameter.uniform_(-0.5, 0.5)  # zeros would hide a norm that ignores them
    return reference


def _vary_choice_biases(reference: PreTrainedModel) -> None:
    with torch.no_grad():
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)  # zeros would hide a choice that ignores them


def make_v2(**changes: object) -> DeepseekV2ForCausalLM:
    torch.manual_seed(7)
    shape = SHAPE | {
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.0,
    }
    reference = DeepseekV2ForCausalLM(DeepseekV2Config(**(shape | changes))).eval()
    vary_norms(reference, 0.5, 1.5)
    return reference
