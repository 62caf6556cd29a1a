"""What recipes of paged attention share: every layer deposits keys and values, one row per token.

Knows no retention: which group a layer rides, and how long that keeps its blocks, is the family's to say.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.base import CacheRecipe
from cache_runtime.recipes.spec import CacheFamily, CacheFieldSpec, CacheGroupSpec, CacheRetention, layer_field_id

_NUM_KV_HEADS_AXIS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsCacheRecipe(CacheRecipe):
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

    def rows_group(self, group_id: str, *, sliding_window_tokens: int | None = None) -> CacheGroupSpec:
        """A group of this recipe's rows; with a window it keeps that many tokens, without it keeps all."""
        sliding = sliding_window_tokens is not None
        return CacheGroupSpec(
            group_id=group_id,
            family=CacheFamily.HISTORY,
            retention=CacheRetention.SLIDING_WINDOW if sliding else CacheRetention.FULL_HISTORY,
            rows_per_page=self.rows_per_block,
            entry_stride_tokens=1,
            sliding_window_tokens=sliding_window_tokens,
        )
