"""config.json of DeepseekV2ForCausalLM, DeepseekV3ForCausalLM and DeepseekV32ForCausalLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from model_runtime.config import ModelConfig, YarnRopeScaling
from model_runtime.hf_configs.rope import DEFAULT_ROPE_THETA, rope_theta, yarn_attention_scale, yarn_rope_scaling
from model_runtime.hf_keys import JsonKeys, eos_token_ids
from model_runtime.layer_configs.experts import ExpertsConfig, ExpertScore, GroupScore
from model_runtime.layer_configs.latent_attention import LatentAttentionConfig
from model_runtime.layer_configs.sparse_index import SparseIndexConfig


def read_deepseek_v2(directory: Path, keys: JsonKeys) -> ModelConfig:
    """Raises CheckpointError naming the key, ValueError for values that contradict each other."""
    keys.refuse_others({"topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,)})
    is_grouped = keys.values.get("topk_method") == "group_limited_greedy"
    experts = _read_experts(
        keys, score=ExpertScore.SOFTMAX, is_grouped=is_grouped, group_score=GroupScore.BEST, has_choice_bias=False
    )
    return _read(directory, keys, "DeepseekV2ForCausalLM", experts, is_interleaved=True)


def read_deepseek_v3(directory: Path, keys: JsonKeys) -> ModelConfig:
    """Raises CheckpointError naming the key, ValueError for values that contradict each other."""
    experts = _read_experts(
        keys, score=ExpertScore.SIGMOID, is_grouped=True, group_score=GroupScore.BEST_TWO, has_choice_bias=True
    )
    is_interleaved = keys.flag("rope_interleave", default=True)
    return _read(directory, keys, "DeepseekV3ForCausalLM", experts, is_interleaved=is_interleaved)


def read_deepseek_v32(directory: Path, keys: JsonKeys) -> ModelConfig:
    """Raises CheckpointError naming the key, ValueError for values that contradict each other."""
    keys.integer("q_lora_rank")  # the indexer's queries are made of it
    keys.refuse_others({"rope_interleave": (True, None)})
    index = SparseIndexConfig(
        num_heads=keys.integer("index_n_heads"),
        head_dim=keys.integer("index_head_dim"),
        num_selected=keys.integer("index_topk"),
    )
    rope_head_dim = keys.integer("qk_rope_head_dim")
    if index.head_dim < rope_head_dim:
        raise ValueError(f"index_head_dim {index.head_dim} is less than the {rope_head_dim} dimensions that turn")
    config = read_deepseek_v3(directory, keys)
    return replace(config, architecture="DeepseekV32ForCausalLM", sparse_index=index)


def _read(
    directory: Path, keys: JsonKeys, architecture: str, experts: ExpertsConfig, *, is_interleaved: bool
) -> ModelConfig:
    keys.refuse_others(
        {
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "quantization_config": (None,),
        }
    )
    rope = keys.nested("rope_parameters") or keys.nested("rope_scaling")
    scaling = None if rope is None else yarn_rope_scaling(rope, keys.integer("max_position_embeddings"))
    latent = LatentAttentionConfig(
        rank=keys.integer("kv_lora_rank"),
        query_rank=keys.find_integer("q_lora_rank"),
        nope_head_dim=keys.integer("qk_nope_head_dim"),
        rope_head_dim=keys.integer("qk_rope_head_dim"),
        value_head_dim=keys.integer("v_head_dim"),
        is_interleaved=is_interleaved,
    )
    return ModelConfig(
        architecture=architecture,
        num_layers=keys.integer("num_hidden_layers"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent.rope_head_dim,
        vocab_size=keys.integer("vocab_size"),
        max_position_tokens=keys.integer("max_position_embeddings"),
        rope_theta=rope_theta(keys, rope, DEFAULT_ROPE_THETA),
        rms_norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        rope_scaling=scaling,
        attention_scale=_attention_scale(latent, rope, scaling),
        experts=experts,
        latent_attention=latent,
        eos_token_ids=eos_token_ids(directory, keys),
        bos_token_id=keys.find_integer("bos_token_id"),
    )


def _attention_scale(latent: LatentAttentionConfig, rope: JsonKeys | None, scaling: YarnRopeScaling | None) -> float:
    scale: float = latent.query_head_dim**-0.5
    return scale if rope is None or scaling is None else scale * yarn_attention_scale(rope, scaling)


def _read_experts(
    keys: JsonKeys, *, score: ExpertScore, is_grouped: bool, group_score: GroupScore, has_choice_bias: bool
) -> ExpertsConfig:
    num_layers, first_sparse = keys.integer("num_hidden_layers"), keys.integer("first_k_dense_replace", 0)
    is_sparse = tuple(layer >= first_sparse for layer in range(num_layers))
    labels = ["sparse" if sparse else "dense" for sparse in is_sparse]
    keys.refuse_others({"mlp_layer_types": (None, labels), "moe_layer_freq": (1, None)})
    intermediate_size = keys.integer("moe_intermediate_size")
    return ExpertsConfig(
        is_sparse=is_sparse,
        num_experts=keys.integer("n_routed_experts"),
        num_experts_per_token=keys.integer("num_experts_per_tok"),
        intermediate_size=intermediate_size,
        shared_intermediate_size=intermediate_size * (keys.find_integer("n_shared_experts") or 0),
        score=score,
        normalizes_weights=has_choice_bias and keys.flag("norm_topk_prob", default=True),
        weight_scale=keys.number("routed_scaling_factor"),
        has_choice_bias=has_choice_bias,
        num_groups=keys.integer("n_group") if is_grouped else 1,
        num_groups_per_token=keys.integer("topk_group") if is_grouped else 1,
        group_score=group_score,
    )
