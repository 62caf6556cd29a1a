"""Kimi Linear: most layers keep a state of the delta rule, the others one compressed row per token."""

from __future__ import annotations

from cache_runtime.layer_binding import CacheLayer, StateLayer
from cache_runtime.recipes.base import CacheLayerType, CacheRecipe
from cache_runtime.recipes.hybrid import HybridCacheRecipe, StateField
from cache_runtime.recipes.rows import RowField
from model_runtime.config import ModelConfig
from model_runtime.family import CacheBudget, ModelFamily
from model_runtime.layers.delta_net import delta_net_conv_sections, delta_net_of
from model_runtime.layers.latent_attention import declare_latent_attention, latent_of
from model_runtime.models.kimi_linear import KimiLinearModel, kimi_linear_tensor_shapes


def _cache_recipe(config: ModelConfig, budget: CacheBudget) -> CacheRecipe:
    delta_net = delta_net_of(config)
    return HybridCacheRecipe(
        prefix_granularity=budget.prefix_granularity,
        memory_bytes=budget.memory_bytes,
        scheduler_limits=budget.scheduler_limits,
        num_layers=config.num_layers,
        row_fields=(RowField(name="latent", row_shape=(latent_of(config).row_width,)),),
        dtype=budget.dtype,
        shard_count=budget.shard_count,
        tensor_rank=budget.tensor_rank,
        layer_kinds=tuple(
            CacheLayerType.STATE if is_recurrent else CacheLayerType.FULL for is_recurrent in delta_net.is_recurrent
        ),
        state_fields=(
            StateField(
                name="conv_state",
                block_shape=(delta_net.conv_width - 1, delta_net.num_conv_channels),
                partition_axis=1,
                sections=delta_net_conv_sections(delta_net),
            ),
            StateField(
                name="recurrent_state",
                block_shape=(delta_net.num_heads, delta_net.key_head_dim, delta_net.value_head_dim),
                partition_axis=0,
            ),
        ),
    )


def _cache_layers(config: ModelConfig) -> tuple[CacheLayer, ...]:
    return tuple(
        StateLayer(layer=layer) if is_recurrent else declare_latent_attention(layer)
        for layer, is_recurrent in enumerate(delta_net_of(config).is_recurrent)
    )


FAMILY = ModelFamily(
    tensor_shapes=kimi_linear_tensor_shapes,
    cache_recipe=_cache_recipe,
    cache_layers=_cache_layers,
    build=KimiLinearModel,
)
