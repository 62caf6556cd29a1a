"""config.json of LlamaForCausalLM."""

from __future__ import annotations

from pathlib import Path

from model_runtime.config import Llama3RopeScaling, ModelConfig, RopeScaling
from model_runtime.hf_configs.rope import DEFAULT_ROPE_THETA, rope_kind, rope_theta, unsupported_rope
from model_runtime.hf_keys import JsonKeys, eos_token_ids


def read_llama(directory: Path, keys: JsonKeys) -> ModelConfig:
    """Raises CheckpointError naming the key, ValueError for values that contradict each other."""
    keys.refuse_others(
        {
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "quantization_config": (None,),
        }
    )
    num_heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    rope = keys.nested("rope_parameters") or keys.nested("rope_scaling")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=keys.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", num_heads),
        head_dim=keys.integer("head_dim", hidden_size // max(num_heads, 1)),
        vocab_size=keys.integer("vocab_size"),
        max_position_tokens=keys.integer("max_position_embeddings"),
        rope_theta=rope_theta(keys, rope, DEFAULT_ROPE_THETA),
        rms_norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        rope_scaling=None if rope is None else _rope_scaling(rope),
        eos_token_ids=eos_token_ids(directory, keys),
        bos_token_id=keys.find_integer("bos_token_id"),
    )


def _rope_scaling(rope: JsonKeys) -> RopeScaling | None:
    kind = rope_kind(rope)
    if kind == "default":
        return None
    if kind != "llama3":
        raise unsupported_rope(rope, ("default", "llama3"))
    return Llama3RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_tokens=rope.integer("original_max_position_embeddings"),
    )
