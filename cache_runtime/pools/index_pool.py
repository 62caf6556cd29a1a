"""IndexPool: the keys by which a sparse indexer chooses rows. Holds views only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache_runtime.arena import CacheArena
from cache_runtime.pools.layer_rows import LayerRows


class IndexPool:
    """Row views of `layers.{i}.index_key` for every i in `layers`.

    Raises UnknownFieldError when the arena's plan lacks a layer's field, CacheConfigError when one is not a row field.
    """

    def __init__(self, arena: CacheArena, layers: Sequence[int]) -> None:
        self.arena = arena
        self._rows = LayerRows(arena, layers, "index_key")

    def rows(self, layer: int) -> torch.Tensor:
        """[num_rows, head_dim] index keys of a layer; row indices are write locations."""
        return self._rows(layer)
