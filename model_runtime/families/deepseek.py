"""DeepSeek V2 and V3: every layer attends over everything, and keeps one compressed row per token."""

from __future__ import annotations

from cache_runtime.layer_binding import PagedAttention
from cache_runtime.recipes.base import CacheRecipe
from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.rows import RowField
from model_runtime.config import ModelConfig
from model_runtime.family import CacheBudget, ModelFamily
from model_runtime.layers.latent_attention import declare_latent_attention, latent_of
from model_runtime.models.deepseek import DeepseekModel, deepseek_tensor_shapes


def _cache_recipe(config: ModelConfig, budget: CacheBudget) -> CacheRecipe:
    return DenseCacheRecipe(
        prefix_granularity=budget.prefix_granularity,
        memory_bytes=budget.memory_bytes,
        scheduler_limits=budget.scheduler_limits,
        num_layers=config.num_layers,
        row_fields=(RowField(name="latent", row_shape=(latent_of(config).row_width,)),),
        dtype=budget.dtype,
        shard_count=budget.shard_count,
        tensor_rank=budget.tensor_rank,
    )


def _cache_layers(config: ModelConfig) -> tuple[PagedAttention, ...]:
    return tuple(declare_latent_attention(layer) for layer in range(config.num_layers))


FAMILY = ModelFamily(
    tensor_shapes=deepseek_tensor_shapes,
    cache_recipe=_cache_recipe,
    cache_layers=_cache_layers,
    build=DeepseekModel,
)
