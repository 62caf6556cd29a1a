"""config.json of BambaForCausalLM."""

from __future__ import annotations

import math
from pathlib import Path

from model_runtime.config import ModelConfig
from model_runtime.hf_configs.rope import DEFAULT_ROPE_THETA, number_or, rope_kind, rope_theta, unsupported_rope
from model_runtime.hf_keys import JsonKeys, eos_token_ids
from model_runtime.layer_configs.mamba2 import Mamba2Config

_TURNING_FRACTION = 0.5  # where a file does not say how much of a head turns


def read_bamba(directory: Path, keys: JsonKeys) -> ModelConfig:
    """Raises CheckpointError naming the key, ValueError for values that contradict each other."""
    keys.refuse_others(
        {
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "mamba_proj_bias": (False, None),
            "quantization_config": (None,),
        }
    )
    num_heads, hidden_size = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    head_dim = keys.integer("head_dim", hidden_size // max(num_heads, 1))
    rope = keys.nested("rope_parameters") or keys.nested("rope_scaling")
    if rope is not None and rope_kind(rope) != "default":
        raise unsupported_rope(rope, ("default",))
    fraction = _TURNING_FRACTION if rope is None else number_or(rope, "partial_rotary_factor", _TURNING_FRACTION)
    return ModelConfig(
        architecture="BambaForCausalLM",
        num_layers=keys.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=keys.integer("vocab_size"),
        max_position_tokens=keys.integer("max_position_embeddings"),
        rope_theta=rope_theta(keys, rope, DEFAULT_ROPE_THETA),
        rms_norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        rotary_dim=int(head_dim * fraction),
        mamba2=_read_mamba2(keys, hidden_size),
        eos_token_ids=eos_token_ids(directory, keys),
        bos_token_id=keys.find_integer("bos_token_id"),
    )


def _read_mamba2(keys: JsonKeys, hidden_size: int) -> Mamba2Config:
    num_layers, num_heads = keys.integer("num_hidden_layers"), keys.integer("mamba_n_heads")
    inner_size = int(keys.number("mamba_expand") * hidden_size)
    attention_layers = keys.integers("attn_layer_indices")
    min_step, max_step = keys.number_pair("time_step_limit") or (0.0, math.inf)
    config = Mamba2Config(
        is_recurrent=tuple(layer not in attention_layers for layer in range(num_layers)),
        num_heads=num_heads,
        head_dim=keys.integer("mamba_d_head") if keys.values.get("mamba_d_head") != "auto" else inner_size // num_heads,
        num_groups=keys.integer("mamba_n_groups"),
        state_dim=keys.integer("mamba_d_state"),
        conv_width=keys.integer("mamba_d_conv"),
        has_conv_bias=keys.flag("mamba_conv_bias", default=True),
        min_step=min_step,
        max_step=max_step,
    )
    if config.inner_size != inner_size:
        raise ValueError(
            f"mamba_n_heads {num_heads} of mamba_d_head {config.head_dim} do not make mamba_expand * hidden_size "
            f"{inner_size}"
        )
    return config
