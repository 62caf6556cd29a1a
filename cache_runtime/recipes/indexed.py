"""Cache recipe of attention behind a sparse indexer: rows in one full-history group, index keys in another.

Either is read through a table of its own, by kernels that know nothing of each other; both keep everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.plan import CacheLayout
from cache_runtime.recipes.rows import RowField
from cache_runtime.recipes.spec import CacheFieldSpec, GroupDeclaration

INDEX_GROUP_ID = "index"
"""The group of the index keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedCacheRecipe(DenseCacheRecipe):
    """Every layer deposits `row_fields` in the group "full" and `index_field` in the group "index"."""

    index_field: RowField

    @override
    def groups(self) -> tuple[GroupDeclaration, ...]:
        # Named, because the bare form of super() does not work in a class with slots.
        full = tuple(f for layer in range(self.num_layers) for f in DenseCacheRecipe.fields_for_layer(self, layer))
        index = tuple(self._index_key(layer) for layer in range(self.num_layers))
        (group_id,) = set(self.group_ids())
        return (self.rows_group(group_id), full), (self.rows_group(INDEX_GROUP_ID), index)

    @override
    def fields_for_layer(self, layer: int) -> tuple[CacheFieldSpec, ...]:
        return (*DenseCacheRecipe.fields_for_layer(self, layer), self._index_key(layer))

    def _index_key(self, layer: int) -> CacheFieldSpec:
        return self.index_field.of_layer(
            layer, rows_per_block=self.rows_per_block, dtype=self.dtype, rank=self.tensor_rank
        )

    @override
    def token_capacity(self, layout: CacheLayout, num_lcm_blocks: int) -> int:
        return self._capacity_from_parents(layout, num_lcm_blocks)

    @override
    def max_padding_fraction(self) -> float:
        """A row and an index key are unlike sizes."""
        return 0.125
