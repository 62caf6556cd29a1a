"""KvPool: the key and value buffers that paged attention kernels of a layer window read and write.

Holds views only; geometry is read from `pool.arena`, never from the pool.
"""

from __future__ import annotations

import torch

from cache_runtime.arena import CacheArena
from cache_runtime.errors import CacheConfigError, UnknownFieldError
from cache_runtime.recipes.spec import check_row_field, layer_field_id


class KvPool:
    """Row views of `layers.{i}.k` and `layers.{i}.v` for i in [layer_begin, layer_end).

    Raises UnknownFieldError when the arena's plan lacks a layer of the window, CacheConfigError when a layer's field is
    not a row field.
    """

    def __init__(self, arena: CacheArena, *, layer_begin: int, layer_end: int) -> None:
        if not 0 <= layer_begin < layer_end:
            raise CacheConfigError(f"layer window [{layer_begin}, {layer_end}) is empty or negative")
        self.arena = arena
        self._layer_begin = layer_begin
        self._layer_end = layer_end
        layers = range(layer_begin, layer_end)
        self._k_buffers = tuple(_rows(arena, layer_field_id(layer, "k")) for layer in layers)
        self._v_buffers = tuple(_rows(arena, layer_field_id(layer, "v")) for layer in layers)

    def k_buffer(self, layer: int) -> torch.Tensor:
        """[num_rows, num_kv_heads, head_dim] keys of a layer; row indices are write locations."""
        return self._k_buffers[self._position(layer)]

    def v_buffer(self, layer: int) -> torch.Tensor:
        """Values of a layer, shaped and indexed like `k_buffer`."""
        return self._v_buffers[self._position(layer)]

    def _position(self, layer: int) -> int:
        if not self._layer_begin <= layer < self._layer_end:
            window = f"[{self._layer_begin}, {self._layer_end})"
            raise UnknownFieldError(f"layer {layer} is outside the pool's window {window}")
        return layer - self._layer_begin


def _rows(arena: CacheArena, field_id: str) -> torch.Tensor:
    field = arena.plan.field(field_id)
    check_row_field(arena.plan.group_layout(field.group_id).spec, field_id, field.block_shape)
    return arena.rows(field_id)
