"""config.json of Qwen3NextForCausalLM."""

from __future__ import annotations

from pathlib import Path

from model_runtime.config import ModelConfig
from model_runtime.errors import CheckpointError
from model_runtime.hf_configs.rope import DEFAULT_ROPE_THETA, number_or, rope_kind, rope_theta, unsupported_rope
from model_runtime.hf_keys import JsonKeys, eos_token_ids
from model_runtime.layer_configs.delta_net import DeltaNetConfig
from model_runtime.layer_configs.experts import ExpertsConfig, ExpertScore

_PARTIAL_ROTARY_FACTOR = 0.25
_LAYERS_PER_FULL = 4


def read_qwen3_next(directory: Path, keys: JsonKeys) -> ModelConfig:
    """Raises CheckpointError naming the key, ValueError for values that contradict each other."""
    keys.refuse_others(
        {
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "quantization_config": (None,),
        }
    )
    rope = keys.nested("rope_parameters") or keys.nested("rope_scaling")
    if rope is not None and rope_kind(rope) != "default":
        raise unsupported_rope(rope, ("default",))
    head_dim, num_layers = keys.integer("head_dim"), keys.integer("num_hidden_layers")
    return ModelConfig(
        architecture="Qwen3NextForCausalLM",
        num_layers=num_layers,
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=keys.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * _rotary_factor(keys, rope)),
        vocab_size=keys.integer("vocab_size"),
        max_position_tokens=keys.integer("max_position_embeddings"),
        rope_theta=rope_theta(keys, rope, DEFAULT_ROPE_THETA),
        rms_norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        delta_net=_read_delta_net(keys, num_layers),
        experts=_read_experts(keys, num_layers),
        eos_token_ids=eos_token_ids(directory, keys),
        bos_token_id=keys.find_integer("bos_token_id"),
    )


def _rotary_factor(keys: JsonKeys, rope: JsonKeys | None) -> float:
    in_config = number_or(keys, "partial_rotary_factor", _PARTIAL_ROTARY_FACTOR)
    return in_config if rope is None else number_or(rope, "partial_rotary_factor", in_config)


def _read_delta_net(keys: JsonKeys, num_layers: int) -> DeltaNetConfig:
    return DeltaNetConfig(
        is_recurrent=_recurrent_layers(keys, num_layers),
        num_heads=keys.integer("linear_num_value_heads"),
        num_key_heads=keys.integer("linear_num_key_heads"),
        key_head_dim=keys.integer("linear_key_head_dim"),
        value_head_dim=keys.integer("linear_value_head_dim"),
        conv_width=keys.integer("linear_conv_kernel_dim"),
    )


def _recurrent_layers(keys: JsonKeys, num_layers: int) -> tuple[bool, ...]:
    labels = keys.strings("layer_types")
    if labels is None:
        period = keys.integer("full_attention_interval", _LAYERS_PER_FULL)
        if period < 1:
            raise ValueError(f"full_attention_interval must be at least 1, got {period}")
        return tuple((layer + 1) % period != 0 for layer in range(num_layers))
    known = ("full_attention", "linear_attention")
    for label in labels:
        if label not in known:
            raise CheckpointError(f'{keys.path}: key "layer_types" names "{label}", supported are {", ".join(known)}')
    return tuple(label == "linear_attention" for label in labels)


def _read_experts(keys: JsonKeys, num_layers: int) -> ExpertsConfig | None:
    num_experts, period = keys.integer("num_experts"), keys.integer("decoder_sparse_step", 1)
    if period < 1:
        raise ValueError(f"decoder_sparse_step must be at least 1, got {period}")
    dense = keys.integers("mlp_only_layers")
    is_sparse = tuple(layer not in dense and (layer + 1) % period == 0 for layer in range(num_layers))
    if num_experts == 0 or not any(is_sparse):
        return None
    return ExpertsConfig(
        is_sparse=is_sparse,
        num_experts=num_experts,
        num_experts_per_token=keys.integer("num_experts_per_tok"),
        intermediate_size=keys.integer("moe_intermediate_size"),
        shared_intermediate_size=keys.integer("shared_expert_intermediate_size"),
        score=ExpertScore.SOFTMAX,
        normalizes_weights=keys.flag("norm_topk_prob", default=True),
    )
