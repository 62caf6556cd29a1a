"""Llama: every layer attends over everything."""

from __future__ import annotations

from cache_runtime.recipes.base import CacheRecipe
from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.rows import key_value_fields
from model_runtime.config import ModelConfig
from model_runtime.family import CacheBudget, ModelFamily
from model_runtime.layers.attention import declare_all_layers
from model_runtime.models.llama import LlamaModel, llama_tensor_shapes


def _cache_recipe(config: ModelConfig, budget: CacheBudget) -> CacheRecipe:
    return DenseCacheRecipe(
        prefix_granularity=budget.prefix_granularity,
        memory_bytes=budget.memory_bytes,
        scheduler_limits=budget.scheduler_limits,
        num_layers=config.num_layers,
        row_fields=key_value_fields(config.num_kv_heads, config.head_dim),
        dtype=budget.dtype,
        shard_count=budget.shard_count,
        tensor_rank=budget.tensor_rank,
    )


FAMILY = ModelFamily(
    tensor_shapes=llama_tensor_shapes,
    cache_recipe=_cache_recipe,
    cache_layers=declare_all_layers,
    build=LlamaModel,
)
