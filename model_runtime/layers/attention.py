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
from model_runtime.layers.rotary import Angles


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
        self._scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """query [tokens, num_heads, head_dim], key and value [tokens, num_kv_heads, head_dim] -> shaped like query."""
        layer, group_id = self.declaration.layer, self.declaration.group_id
        store_rows(context.pools.kv.k_buffer(layer), key, group_id, context)
        store_rows(context.pools.kv.v_buffer(layer), value, group_id, context)
        return self._attend(query, context)

    def turning(self, heads: torch.Tensor, angles: Angles, context: ForwardContext) -> torch.Tensor:
        """Attention of query, key and value heads beside one another, the first two of which turn, in place.

        `heads` [tokens, num_heads + 2 * num_kv_heads, head_dim] -> [tokens, num_heads, head_dim].
        """
        layer, group_id = self.declaration.layer, self.declaration.group_id
        context.kernels.rotate_and_store(
            heads,
            angles.cosines,
            angles.sines,
            context.routed.write_locations(group_id),
            context.pools.kv.k_buffer(layer),
            context.pools.kv.v_buffer(layer),
        )
        return self._attend(heads[:, : -2 * self._num_kv_heads], context)

    def _attend(self, query: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        layer, group_id = self.declaration.layer, self.declaration.group_id
        context.on_stored(layer)
        page_tokens = context.routed.kernel_page_size(group_id)
        return attend_rows(
            query,
            context.pools.kv.k_pages(layer, page_tokens),
            context.pools.kv.v_pages(layer, page_tokens),
            group_id,
            self._scale,
            self.declaration.window_left_tokens,
            context,
        )
