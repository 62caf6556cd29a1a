"""LatentPool: the compressed rows that multi-head latent attention reads and writes. Holds views only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache_runtime.arena import CacheArena
from cache_runtime.pools.layer_rows import LayerRows


class LatentPool:
    """Row views of `layers.{i}.latent` for every i in `layers`.

    Raises UnknownFieldError when the arena's plan lacks a layer's field, CacheConfigError when one is not a row field.
    """

    def __init__(self, arena: CacheArena, layers: Sequence[int]) -> None:
        self.arena = arena
        self._rows = LayerRows(arena, layers, "latent")

    def rows(self, layer: int) -> torch.Tensor:
        """[num_rows, latent width] of a layer; row indices are write locations."""
        return self._rows(layer)
