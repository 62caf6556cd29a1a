"""Cache recipe of models that mix recurrent layers and attention: one group of state snapshots, one of rows.

A state layer keeps no row per token. Its block is the whole state at one position, so its size does not depend on the
span it covers, and most slots of a request's state table are holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.base import CacheLayerType
from cache_runtime.recipes.partition import HeadSection, TensorRank
from cache_runtime.recipes.plan import CacheLayout
from cache_runtime.recipes.rows import RowsCacheRecipe
from cache_runtime.recipes.spec import CacheFamily, CacheFieldSpec, CacheGroupSpec, CacheRetention, layer_field_id

STATE_GROUP_ID = CacheLayerType.STATE.value
"""The group of the layers that keep a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateField:
    """One tensor of a layer's state: field `layers.{i}.{name}`, `block_shape` per snapshot, over all tensor ranks.

    States stay float32 by default whatever the rows are: a recurrence adds its rounding errors up. `partition_axis` is
    the axis that ranks split, `sections` what it is made of; none: heads of one element.
    """

    name: str
    block_shape: tuple[int, ...]
    dtype: str = "float32"
    partition_axis: int | None = None
    sections: tuple[HeadSection, ...] = ()

    def of_layer(self, layer: int, rank: TensorRank) -> CacheFieldSpec:
        """A rank's field of one layer."""
        field_id, axis = layer_field_id(layer, self.name), self.partition_axis
        if axis is None:
            return CacheFieldSpec(field_id=field_id, dtype=self.dtype, block_shape=self.block_shape)
        return CacheFieldSpec.partitioned(
            field_id=field_id,
            dtype=self.dtype,
            global_shape=self.block_shape,
            axis=axis,
            sections=self.sections or (HeadSection(num_heads=self.block_shape[axis]),),
            rank=rank,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridCacheRecipe(RowsCacheRecipe):
    """Layer i deposits `row_fields` where `layer_kinds[i]` is FULL and `state_fields` where it is STATE.

    `checkpoint_granularity`, in tokens, is the span of a state block and defaults to one per prefix grain. Raises
    CacheConfigError naming the field.
    """

    layer_kinds: tuple[CacheLayerType, ...]
    state_fields: tuple[StateField, ...]
    checkpoint_granularity: int | None = None

    def __post_init__(self) -> None:
        RowsCacheRecipe.__post_init__(self)
        if len(self.layer_kinds) != self.num_layers:
            raise CacheConfigError(f"layer_kinds names {len(self.layer_kinds)} layers, num_layers is {self.num_layers}")
        for layer, kind in enumerate(self.layer_kinds):
            if kind not in (CacheLayerType.FULL, CacheLayerType.STATE):
                raise CacheConfigError(f"layer_kinds[{layer}] must be full or state, got {kind}")
        if not self.state_fields:
            raise CacheConfigError("state_fields must not be empty")

    @override
    def layer_types(self) -> Sequence[CacheLayerType]:
        return self.layer_kinds

    @override
    def fields_for_layer(self, layer: int) -> tuple[CacheFieldSpec, ...]:
        if self.layer_kinds[layer] is CacheLayerType.FULL:
            # Named, because the bare form of super() does not work in a class with slots.
            return RowsCacheRecipe.fields_for_layer(self, layer)
        return tuple(field.of_layer(layer, self.tensor_rank) for field in self.state_fields)

    @override
    def group_spec(self, group_id: str) -> CacheGroupSpec:
        if group_id != STATE_GROUP_ID:
            return self.rows_group(group_id)
        granularity = self.checkpoint_granularity
        return CacheGroupSpec(
            group_id=group_id,
            family=CacheFamily.STATE,
            retention=CacheRetention.FULL_HISTORY,
            checkpoint_granularity=self.prefix_granularity if granularity is None else granularity,
        )

    @override
    def token_capacity(self, layout: CacheLayout, num_lcm_blocks: int) -> int:
        return self._capacity_from_parents(layout, num_lcm_blocks)

    @override
    def max_padding_fraction(self) -> float:
        """A snapshot and a block of rows are unlike sizes; an exact parent could hold hundreds of either."""
        return 0.125
