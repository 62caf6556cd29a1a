"""The cache side of an attention layer: write this forward's rows, then attend over all of them.

Reads and writes the arena through the mapping only: rows go to the router's write locations, history is read through
its page table.
"""

from __future__ import annotations

import torch

from cache_runtime.layer_binding import PagedAttention
from model_runtime.config import ModelConfig
from model_runtime.forward_context import ForwardContext
from model_runtime.layers.cached_rows import attend_rows, store_rows


def declare_attention(layer: int, config: ModelConfig) -> PagedAttention:
    """What an attention layer tells the cache of itself; known before any weight is read."""
    return PagedAttention(layer=layer, window_left_tokens=config.window_left_tokens(layer))


def declare_all_layers(config: ModelConfig) -> tuple[PagedAttention, ...]:
    """The declarations of a model of nothing but attention layers."""
    return tuple(declare_attention(layer, config) for layer in range(config.num_layers))


class CachedAttention:
    """One layer's attention over the paged cache, `num_kv_heads` of which are on this rank.

    `declaration` is what the layer binding stamps with a cache group.
    """

    def __init__(self, layer: int, config: ModelConfig, num_kv_heads: int) -> None:
        self.declaration = declare_attention(layer, config)
        self._num_kv_heads = num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """query [tokens, num_heads, head_dim], key and value [tokens, num_kv_heads, head_dim] -> shaped like query."""
        layer, group_id = self.declaration.layer, self.declaration.group_id
        key_rows, value_rows = context.pools.kv.k_buffer(layer), context.pools.kv.v_buffer(layer)
        store_rows(key_rows, key, group_id, context)
        store_rows(value_rows, value, group_id, context)
        context.on_stored(layer)
        page_tokens = context.routed.kernel_page_size(group_id)
        return attend_rows(
            query,
            self._pages(key_rows, page_tokens),
            self._pages(value_rows, page_tokens),
            group_id,
            self._scale,
            self.declaration.window_left_tokens,
            context,
        )

    def _pages(self, rows: torch.Tensor, page_tokens: int) -> torch.Tensor:
        return rows.view(-1, page_tokens, self._num_kv_heads, self._head_dim)
