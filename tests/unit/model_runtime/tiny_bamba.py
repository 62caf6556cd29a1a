"""Tiny random Bamba checkpoints: three state spaces to one layer of attention, and two groups of heads."""

from __future__ import annotations

import torch
from transformers import BambaConfig, BambaForCausalLM
from unit.model_runtime.reference_models import vary_norms

VOCAB_SIZE = 131
SHAPE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "attn_layer_indices": [2],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_reference(**changes: object) -> BambaForCausalLM:
    torch.manual_seed(7)
    reference = BambaForCausalLM(BambaConfig(**(SHAPE | changes))).eval()
    vary_norms(reference, 0.5, 1.5)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            # Initialised to constants, which would hide a model that ignores them.
            if name.endswith(("dt_bias", "mamba.D")):
                parameter.uniform_(-1.0, 1.0)
            if name.endswith("A_log"):
                parameter.uniform_(-3.0, 1.0)  # memories of unlike length
    return reference
