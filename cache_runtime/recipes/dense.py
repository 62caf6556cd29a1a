"""Cache recipe of dense full attention (Llama, Qwen3): keys and values of every layer in one full-history group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from cache_runtime.recipes.base import CacheLayerType
from cache_runtime.recipes.rows import RowsCacheRecipe
from cache_runtime.recipes.spec import CacheGroupSpec

FULL_GROUP_ID = CacheLayerType.FULL.value
"""The single group of a dense model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCacheRecipe(RowsCacheRecipe):
    """All layers keep everything."""

    @override
    def layer_types(self) -> Sequence[CacheLayerType]:
        return (CacheLayerType.FULL,) * self.num_layers

    @override
    def group_spec(self, group_id: str) -> CacheGroupSpec:
        return self.rows_group(group_id)
