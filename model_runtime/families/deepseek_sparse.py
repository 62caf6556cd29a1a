"""DeepSeek V3.2: latent attention to the rows that an indexer chooses by keys in a cache group of their own."""

from __future__ import annotations

from cache_runtime.errors import CacheConfigError
from cache_runtime.layer_binding import PagedAttention
from cache_runtime.recipes.base import CacheRecipe
from cache_runtime.recipes.indexed import IndexedCacheRecipe
from cache_runtime.recipes.rows import RowField
from model_runtime.config import ModelConfig
from model_runtime.family import CacheBudget, ModelFamily
from model_runtime.layers.latent_attention import declare_latent_attention, latent_of
from model_runtime.layers.sparse_index import declare_index, sparse_index_of
from model_runtime.models.deepseek import DeepseekModel, deepseek_tensor_shapes


def _cache_recipe(config: ModelConfig, budget: CacheBudget) -> CacheRecipe:
    if budget.shard_count != 1:
        # The best rows of a history are not the best of its shares.
        raise CacheConfigError(f"rows behind a sparse indexer cannot be shared by {budget.shard_count} context ranks")
    return IndexedCacheRecipe(
        prefix_granularity=budget.prefix_granularity,
        memory_bytes=budget.memory_bytes,
        scheduler_limits=budget.scheduler_limits,
        num_layers=config.num_layers,
        row_fields=(RowField(name="latent", row_shape=(latent_of(config).row_width,)),),
        index_field=RowField(name="index_key", row_shape=(sparse_index_of(config).head_dim,)),
        dtype=budget.dtype,
        tensor_rank=budget.tensor_rank,
    )


def _cache_layers(config: ModelConfig) -> tuple[PagedAttention, ...]:
    kinds = (declare_latent_attention, declare_index)
    return tuple(declare(layer) for layer in range(config.num_layers) for declare in kinds)


FAMILY = ModelFamily(
    tensor_shapes=deepseek_tensor_shapes,
    cache_recipe=_cache_recipe,
    cache_layers=_cache_layers,
    build=DeepseekModel,
)
