"""Gemma 3: layers that see a window keep a window, the others keep everything."""

from __future__ import annotations

from cache_runtime.recipes.base import CacheRecipe
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.recipes.sliding_full import SlidingFullCacheRecipe
from model_runtime.config import ModelConfig
from model_runtime.errors import CheckpointError
from model_runtime.family import CacheBudget, ModelFamily
from model_runtime.layers.attention import declare_all_layers
from model_runtime.models.gemma3 import Gemma3Model, gemma3_tensor_shapes


def _cache_recipe(config: ModelConfig, budget: CacheBudget) -> CacheRecipe:
    if config.sliding is None:
        raise CheckpointError(f"{config.architecture}: the config names no sliding layers")
    return SlidingFullCacheRecipe(
        prefix_granularity=budget.prefix_granularity,
        memory_bytes=budget.memory_bytes,
        scheduler_limits=budget.scheduler_limits,
        num_layers=config.num_layers,
        row_fields=key_value_fields(config.num_kv_heads, config.head_dim),
        dtype=budget.dtype,
        shard_count=budget.shard_count,
        tensor_rank=budget.tensor_rank,
        is_sliding=config.sliding.is_sliding,
        sliding_window_tokens=config.sliding.window_tokens,
    )


FAMILY = ModelFamily(
    tensor_shapes=gemma3_tensor_shapes,
    cache_recipe=_cache_recipe,
    cache_layers=declare_all_layers,
    build=Gemma3Model,
)
