"""KvPool: the key and value buffers that paged attention kernels read and write.

Holds views only; geometry is read from `pool.arena`, never from the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache_runtime.arena import CacheArena
from cache_runtime.pools.layer_rows import LayerRows


class KvPool:
    """Row views of `layers.{i}.k` and `layers.{i}.v` for every i in `layers`.

    Raises UnknownFieldError when the arena's plan lacks a layer's field, CacheConfigError when one is not a row field.
    """

    def __init__(self, arena: CacheArena, layers: Sequence[int]) -> None:
        self.arena = arena
        self._keys = LayerRows(arena, layers, "k")
        self._values = LayerRows(arena, layers, "v")

    def k_buffer(self, layer: int) -> torch.Tensor:
        """[num_rows, num_kv_heads, head_dim] keys of a layer; row indices are write locations."""
        return self._keys(layer)

    def v_buffer(self, layer: int) -> torch.Tensor:
        """Values of a layer, shaped and indexed like `k_buffer`."""
        return self._values(layer)

    def k_pages(self, layer: int, page_tokens: int) -> torch.Tensor:
        """[num_pages, page_tokens, num_kv_heads, head_dim]: `k_buffer` by kernel pages of so many tokens."""
        return self._keys.pages(layer, page_tokens)

    def v_pages(self, layer: int, page_tokens: int) -> torch.Tensor:
        """`v_buffer` likewise."""
        return self._values.pages(layer, page_tokens)
