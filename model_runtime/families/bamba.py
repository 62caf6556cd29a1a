"""Bamba: state spaces keep one state, the layers of attention between them everything."""

from __future__ import annotations

from cache_runtime.layer_binding import CacheLayer, StateLayer
from cache_runtime.recipes.base import CacheLayerType, CacheRecipe
from cache_runtime.recipes.hybrid import HybridCacheRecipe, StateField
from cache_runtime.recipes.rows import key_value_fields
from model_runtime.config import ModelConfig
from model_runtime.family import CacheBudget, ModelFamily
from model_runtime.layers.attention import declare_attention
from model_runtime.layers.mamba2 import mamba2_conv_sections
from model_runtime.models.bamba import BambaModel, bamba_tensor_shapes, mamba2_of


def _cache_recipe(config: ModelConfig, budget: CacheBudget) -> CacheRecipe:
    mamba2 = mamba2_of(config)
    kinds = {True: CacheLayerType.STATE, False: CacheLayerType.FULL}
    return HybridCacheRecipe(
        prefix_granularity=budget.prefix_granularity,
        memory_bytes=budget.memory_bytes,
        scheduler_limits=budget.scheduler_limits,
        num_layers=config.num_layers,
        row_fields=key_value_fields(config.num_kv_heads, config.head_dim),
        dtype=budget.dtype,
        shard_count=budget.shard_count,
        tensor_rank=budget.tensor_rank,
        layer_kinds=tuple(kinds[is_recurrent] for is_recurrent in mamba2.is_recurrent),
        state_fields=(
            StateField(
                name="conv_state",
                block_shape=(mamba2.conv_width - 1, mamba2.num_conv_channels),
                partition_axis=1,
                sections=mamba2_conv_sections(mamba2),
            ),
            StateField(
                name="recurrent_state",
                block_shape=(mamba2.num_heads, mamba2.state_dim, mamba2.head_dim),
                partition_axis=0,
            ),
        ),
    )


def _cache_layers(config: ModelConfig) -> tuple[CacheLayer, ...]:
    return tuple(
        StateLayer(layer=layer) if is_recurrent else declare_attention(layer, config)
        for layer, is_recurrent in enumerate(mamba2_of(config).is_recurrent)
    )


FAMILY = ModelFamily(
    tensor_shapes=bamba_tensor_shapes,
    cache_recipe=_cache_recipe,
    cache_layers=_cache_layers,
    build=BambaModel,
)
