"""config.json of Gemma3ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from model_runtime.config import ModelConfig, RopeFrequencyDivisors, RopeScaling, SlidingLayers, every_nth_layer_full
from model_runtime.errors import CheckpointError
from model_runtime.hf_configs.rope import number_or, rope_kind, rope_theta, unsupported_rope
from model_runtime.hf_keys import JsonKeys, eos_token_ids

_ROPE_THETA = 1_000_000.0
_SLIDING_ROPE_THETA = 10000.0
_LAYERS_PER_FULL = 6  # where a file does not say which layers see everything


def read_gemma3(directory: Path, keys: JsonKeys) -> ModelConfig:
    """Raises CheckpointError naming the key, ValueError for values that contradict each other."""
    keys.refuse_others(
        {
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False, None),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
            "quantization_config": (None,),
        }
    )
    rope = keys.nested("rope_parameters")
    full = keys.nested("rope_scaling") if rope is None else rope.nested("full_attention")
    head_dim = keys.integer("head_dim")
    num_layers = keys.integer("num_hidden_layers")
    return ModelConfig(
        architecture="Gemma3ForCausalLM",
        num_layers=num_layers,
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=keys.integer("num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=keys.integer("vocab_size"),
        max_position_tokens=keys.integer("max_position_embeddings"),
        rope_theta=rope_theta(keys, full, _ROPE_THETA),
        rms_norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=True),
        rope_scaling=None if full is None else _linear_rope_scaling(full, head_dim),
        attention_scale=keys.number("query_pre_attn_scalar") ** -0.5,
        sliding=SlidingLayers(
            is_sliding=_sliding_layers(keys, num_layers),
            window_tokens=keys.integer("sliding_window"),
            rope_theta=_windowrope_theta(keys, rope),
        ),
        eos_token_ids=eos_token_ids(directory, keys),
        bos_token_id=keys.find_integer("bos_token_id"),
    )


def _sliding_layers(keys: JsonKeys, num_layers: int) -> tuple[bool, ...]:
    labels = keys.strings("layer_types")
    if labels is None:
        period = keys.integer("sliding_window_pattern", _LAYERS_PER_FULL)
        return every_nth_layer_full(num_layers, period)
    known = ("full_attention", "sliding_attention")
    for label in labels:
        if label not in known:
            raise CheckpointError(f'{keys.path}: key "layer_types" names "{label}", supported are {", ".join(known)}')
    return tuple(label == "sliding_attention" for label in labels)


def _windowrope_theta(keys: JsonKeys, rope: JsonKeys | None) -> float:
    if rope is None:
        return number_or(keys, "rope_local_base_freq", _SLIDING_ROPE_THETA)
    sliding = rope.nested("sliding_attention")
    if sliding is None:
        return _SLIDING_ROPE_THETA
    if rope_kind(sliding) != "default":
        raise unsupported_rope(sliding, ("default",))
    return number_or(sliding, "rope_theta", _SLIDING_ROPE_THETA)


def _linear_rope_scaling(rope: JsonKeys, head_dim: int) -> RopeScaling | None:
    kind = rope_kind(rope)
    if kind == "default":
        return None
    if kind != "linear":
        raise unsupported_rope(rope, ("default", "linear"))
    return RopeFrequencyDivisors(divisors=(rope.number("factor"),) * (head_dim // 2))
