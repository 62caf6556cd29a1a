"""Cache recipe of dense full attention (Llama, Qwen3): keys and values of every layer in one full-history group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.base import CacheRecipe
from cache_runtime.recipes.spec import CacheFamily, CacheFieldSpec, CacheGroupSpec, CacheRetention, layer_field_id

FULL_GROUP_ID = "full"
"""The single group of a dense model."""

_NUM_KV_HEADS_AXIS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCacheRecipe(CacheRecipe):
    """Fields `layers.{i}.k` and `layers.{i}.v`, each [block_granularity, num_kv_heads, head_dim] per block.

    `block_granularity` is in tokens and defaults to one block per prefix grain. Raises CacheConfigError naming the
    field and its value.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_granularity: int | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("prefix_granularity", self.prefix_granularity),
            ("memory_bytes", self.memory_bytes),
            ("num_layers", self.num_layers),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("block_granularity", self.rows_per_block),
        ):
            if value < 1:
                raise CacheConfigError(f"{name} must be at least 1, got {value}")

    @property
    def rows_per_block(self) -> int:
        """Rows, one per token, in a block."""
        return self.prefix_granularity if self.block_granularity is None else self.block_granularity

    @override
    def group_ids(self) -> Sequence[str]:
        return (FULL_GROUP_ID,) * self.num_layers

    @override
    def group_spec(self, group_id: str) -> CacheGroupSpec:
        return CacheGroupSpec(
            group_id=group_id,
            family=CacheFamily.HISTORY,
            retention=CacheRetention.FULL_HISTORY,
            rows_per_page=self.rows_per_block,
            entry_stride_tokens=1,
        )

    @override
    def fields_for_layer(self, layer: int) -> tuple[CacheFieldSpec, ...]:
        return tuple(
            CacheFieldSpec(
                field_id=layer_field_id(layer, name),
                dtype=self.dtype,
                block_shape=(self.rows_per_block, self.num_kv_heads, self.head_dim),
                partition_axis=_NUM_KV_HEADS_AXIS,
            )
            for name in ("k", "v")
        )
