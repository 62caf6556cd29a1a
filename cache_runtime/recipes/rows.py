"""What recipes of attention share: layers deposit rows, one per token, whatever a row is made of.

Knows no retention: which group a layer rides, and how long that keeps its blocks, is the family's to say.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.base import CacheRecipe
from cache_runtime.recipes.partition import ONLY_RANK, HeadSection, TensorRank
from cache_runtime.recipes.spec import CacheFamily, CacheFieldSpec, CacheGroupSpec, CacheRetention, layer_field_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RowField:
    """What one token leaves in one tensor of a layer: field `layers.{i}.{name}`, rows of `row_shape` elements.

    `row_shape` is over all tensor ranks, `partition_axis` the axis of heads that they split; None: every rank has the
    row whole. Raises CacheConfigError naming the field.
    """

    name: str
    row_shape: tuple[int, ...]
    partition_axis: int | None = None

    def __post_init__(self) -> None:
        if not self.row_shape or min(self.row_shape) < 1:
            raise CacheConfigError(
                f'row field "{self.name}": row_shape needs positive dimensions, got {self.row_shape}'
            )

    def of_layer(self, layer: int, *, rows_per_block: int, dtype: str, rank: TensorRank) -> CacheFieldSpec:
        """A rank's field of one layer: `rows_per_block` rows per block, of its heads."""
        field_id, shape = layer_field_id(layer, self.name), (rows_per_block, *self.row_shape)
        if self.partition_axis is None:
            return CacheFieldSpec(field_id=field_id, dtype=dtype, block_shape=shape)
        return CacheFieldSpec.partitioned(
            field_id=field_id,
            dtype=dtype,
            global_shape=shape,
            axis=self.partition_axis + 1,
            sections=(HeadSection(num_heads=self.row_shape[self.partition_axis]),),
            rank=rank,
        )


def key_value_fields(num_kv_heads: int, head_dim: int) -> tuple[RowField, ...]:
    """Keys and values of paged attention, each [num_kv_heads, head_dim] per token and split by heads."""
    for name, value in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        if value < 1:
            raise CacheConfigError(f"{name} must be at least 1, got {value}")
    return tuple(RowField(name=name, row_shape=(num_kv_heads, head_dim), partition_axis=0) for name in ("k", "v"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsCacheRecipe(CacheRecipe):
    """Every layer deposits `row_fields` of `dtype`.

    `block_granularity` is in tokens and defaults to one block per prefix grain. The blocks of groups that keep all rows
    are spread over `shard_count` context ranks, each with an arena of `memory_bytes`; other groups are on every rank.
    The fields are those of `tensor_rank`. Raises CacheConfigError naming the field and its value.
    """

    num_layers: int
    row_fields: tuple[RowField, ...]
    dtype: str
    block_granularity: int | None = None
    shard_count: int = 1
    tensor_rank: TensorRank = ONLY_RANK

    def __post_init__(self) -> None:
        for name, value in (
            ("prefix_granularity", self.prefix_granularity),
            ("memory_bytes", self.memory_bytes),
            ("num_layers", self.num_layers),
            ("row_fields", len(self.row_fields)),
            ("block_granularity", self.rows_per_block),
            ("shard_count", self.shard_count),
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
            field.of_layer(layer, rows_per_block=self.rows_per_block, dtype=self.dtype, rank=self.tensor_rank)
            for field in self.row_fields
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
            shard_count=1 if sliding else self.shard_count,
        )
