"""The sparse indexer before latent attention: its keys ride a cache group of their own, and it names rows to attend to.

Source: DeepSeek-AI 2025, "DeepSeek-V3.2"; tensor names and numerics of transformers' DeepseekV32ForCausalLM. Its heads
turn in the half-split layout whatever those of the attention do. T is tokens of the forward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import layer_norm

from cache_runtime.layer_binding import PagedAttention
from model_runtime.config import ModelConfig
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.sparse_index import SparseIndexConfig
from model_runtime.layers.cached_rows import store_rows
from model_runtime.layers.rotary import Angles, rotate
from model_runtime.weights import Shape

_KEY_NORM_EPS = 1e-6


def declare_index(layer: int) -> PagedAttention:
    """What the layer tells the cache of its index keys; known before any weight is read."""
    return PagedAttention(layer=layer, field_name="index_key")


def sparse_index_of(config: ModelConfig) -> SparseIndexConfig:
    """Raises ValueError for a model without an indexer."""
    if config.sparse_index is None:
        raise ValueError(f"{config.architecture}: the config has no sparse_index")
    return config.sparse_index


def sparse_index_shapes(prefix: str, query_rank: int, config: ModelConfig) -> Mapping[str, Shape]:
    """Shapes of the tensors of one layer; queries are made of `query_rank` numbers per token."""
    index, hidden = sparse_index_of(config), config.hidden_size
    return {
        prefix + "wq_b.weight": (index.num_heads * index.head_dim, query_rank),
        prefix + "wk.weight": (index.head_dim, hidden),
        prefix + "k_norm.weight": (index.head_dim,),
        prefix + "k_norm.bias": (index.head_dim,),
        prefix + "weights_proj.weight": (index.num_heads, hidden),
    }


class SparseIndex:
    """The indexer of one layer, the tensors named `{prefix}wk.weight` and so on."""

    def __init__(self, layer: int, prefix: str, builder: LayerBuilder) -> None:
        self._config, self._kernels = sparse_index_of(builder.config), builder.kernels
        self._query = builder.linear(prefix + "wq_b.weight")  # [num_heads * head_dim, query_rank]
        self._key = builder.linear(prefix + "wk.weight")  # [head_dim, hidden]
        self._key_norm = builder.tensor(prefix + "k_norm.weight")  # [head_dim]
        self._key_bias = builder.tensor(prefix + "k_norm.bias")  # [head_dim]
        self._weights = builder.linear(prefix + "weights_proj.weight")  # [num_heads, hidden]
        self.declaration = declare_index(layer)

    def store(self, hidden: torch.Tensor, angles: Angles, context: ForwardContext) -> None:
        """Leaves the tokens' index keys in the cache."""
        keys = self._key(hidden)  # [T, head_dim]
        normed = layer_norm(keys, keys.shape[1:], self._key_norm, self._key_bias, _KEY_NORM_EPS)
        turned = rotate(normed.unsqueeze(1), angles, self._kernels).squeeze(1)
        store_rows(context.pools.index.rows(self.declaration.layer), turned, self.declaration.group_id, context)

    def select(
        self, hidden: torch.Tensor, compressed: torch.Tensor, angles: Angles, context: ForwardContext
    ) -> torch.Tensor:
        """int32[T, num_selected] positions, ascending, -1 behind the last. `compressed`: [T, query_rank]."""
        config, group_id = self._config, self.declaration.group_id
        query = self._query(compressed).view(-1, config.num_heads, config.head_dim)
        weights = self._weights(hidden) * (config.num_heads * config.head_dim) ** -0.5
        page_tokens = context.routed.kernel_page_size(group_id)
        selected = torch.empty((hidden.shape[0], config.num_selected), dtype=torch.int32)
        self._kernels.select_rows(
            rotate(query, angles, self._kernels),
            weights,
            context.pools.index.rows(self.declaration.layer).view(-1, page_tokens, config.head_dim),
            context.routed.page_table(group_id),
            context.batch.begins,
            context.batch.lengths,
            selected,
        )
        return selected
