"""config.json of KimiLinearForCausalLM, as `transformers` writes it and as the published files have it.

The latter name recurrent layers, counted from one, in an object `linear_attn_config`.
"""

from __future__ import annotations

from pathlib import Path

from model_runtime.config import ModelConfig
from model_runtime.errors import CheckpointError
from model_runtime.hf_configs.rope import DEFAULT_ROPE_THETA
from model_runtime.hf_keys import JsonKeys, eos_token_ids
from model_runtime.layer_configs.delta_net import DeltaNetConfig
from model_runtime.layer_configs.experts import ExpertsConfig, ExpertScore, GroupScore
from model_runtime.layer_configs.latent_attention import LatentAttentionConfig


def read_kimi_linear(directory: Path, keys: JsonKeys) -> ModelConfig:
    """Raises CheckpointError naming the key, ValueError for values that contradict each other."""
    keys.refuse_others(
        {
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "mla_use_nope": (True, None),
            "moe_router_activation_func": ("sigmoid", None),
            "moe_layer_freq": (1, None),
            "quantization_config": (None,),
        }
    )
    num_layers = keys.integer("num_hidden_layers")
    latent = LatentAttentionConfig(
        rank=keys.integer("kv_lora_rank"),
        query_rank=keys.find_integer("q_lora_rank"),
        nope_head_dim=keys.integer("qk_nope_head_dim"),
        rope_head_dim=keys.integer("qk_rope_head_dim"),
        value_head_dim=keys.integer("v_head_dim"),
        is_rotary=False,
    )
    return ModelConfig(
        architecture="KimiLinearForCausalLM",
        num_layers=num_layers,
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent.rope_head_dim,
        vocab_size=keys.integer("vocab_size"),
        max_position_tokens=keys.integer("model_max_length"),
        rope_theta=DEFAULT_ROPE_THETA,
        rms_norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        experts=_read_experts(keys, num_layers),
        latent_attention=latent,
        delta_net=_read_delta_net(keys, num_layers),
        eos_token_ids=eos_token_ids(directory, keys),
        bos_token_id=keys.find_integer("bos_token_id"),
    )


def _read_delta_net(keys: JsonKeys, num_layers: int) -> DeltaNetConfig:
    published = keys.nested("linear_attn_config")
    if published is None:
        labels = _labels(keys, "layer_types", num_layers, ("full_attention", "linear_attention"))
        is_recurrent = tuple(label == "linear_attention" for label in labels)
        num_heads, head_dim = keys.integer("linear_num_heads"), keys.integer("linear_head_dim")
        conv_width = keys.integer("linear_conv_kernel_dim")
    else:
        recurrent = published.integers("kda_layers")
        is_recurrent = tuple(layer + 1 in recurrent for layer in range(num_layers))
        num_heads, head_dim = published.integer("num_heads"), published.integer("head_dim")
        conv_width = published.integer("short_conv_kernel_size")
    return DeltaNetConfig(
        is_recurrent=is_recurrent,
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        conv_width=conv_width,
    )


def _read_experts(keys: JsonKeys, num_layers: int) -> ExpertsConfig:
    intermediate_size = keys.integer("moe_intermediate_size")
    return ExpertsConfig(
        is_sparse=_sparse_layers(keys, num_layers),
        num_experts=keys.integer("num_experts"),
        num_experts_per_token=keys.integer("num_experts_per_token"),
        intermediate_size=intermediate_size,
        shared_intermediate_size=intermediate_size * (keys.find_integer("num_shared_experts") or 0),
        score=ExpertScore.SIGMOID,
        normalizes_weights=keys.flag("moe_renormalize", default=True),
        weight_scale=keys.number("routed_scaling_factor"),
        has_choice_bias=True,
        num_groups=keys.integer("num_expert_group", 1),
        num_groups_per_token=keys.integer("topk_group", 1),
        group_score=GroupScore.BEST_TWO,
    )


def _sparse_layers(keys: JsonKeys, num_layers: int) -> tuple[bool, ...]:
    if keys.values.get("mlp_layer_types") is None:
        first_sparse = keys.integer("first_k_dense_replace", 0)
        return tuple(layer >= first_sparse for layer in range(num_layers))
    labels = _labels(keys, "mlp_layer_types", num_layers, ("dense", "sparse"))
    return tuple(label == "sparse" for label in labels)


def _labels(keys: JsonKeys, key: str, num_layers: int, known: tuple[str, ...]) -> tuple[str, ...]:
    labels = keys.strings(key)
    if labels is None or len(labels) != num_layers:
        found = None if labels is None else len(labels)
        raise CheckpointError(f'{keys.path}: key "{key}" names {found} layers, num_hidden_layers is {num_layers}')
    for label in labels:
        if label not in known:
            raise CheckpointError(f'{keys.path}: key "{key}" names "{label}", supported are {", ".join(known)}')
    return labels
