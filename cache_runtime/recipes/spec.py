"""What a cache group and its fields are, before any byte is placed.

Torch-free: dtypes are names. A group id is written once, in its spec, next to the fields that deposit bytes in it;
fields name no group and specs no packing, so neither can disagree with the plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.partition import HeadSection, TensorRank

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1})
"""Bytes per element of every dtype a cache field may have."""

_LAYER_FIELD = re.compile(r"layers\.(0|[1-9][0-9]*)\.([a-z][a-z0-9_]*)")


class CacheFamily(StrEnum):
    """The declaration shape of a group: rows of entries, or one snapshot per block."""

    HISTORY = "history"
    STATE = "state"


class CacheRetention(StrEnum):
    """How long the scheduler keeps a group's blocks."""

    FULL_HISTORY = "full_history"
    SLIDING_WINDOW = "sliding_window"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroupSpec:
    """Declaration of one cache group; exactly one of the two shapes.

    History groups declare rows (`rows_per_page` x `entry_stride_tokens`), full history or sliding. State groups declare
    `checkpoint_granularity` and always retain their full history: a checkpoint summarises everything before it.
    All spans are tokens. `shard_count` owners hold a group's blocks cyclically; 1 means replicated.
    Raises CacheConfigError naming the group and field.
    """

    group_id: str
    family: CacheFamily
    retention: CacheRetention
    rows_per_page: int | None = None
    entry_stride_tokens: int | None = None
    checkpoint_granularity: int | None = None
    sliding_window_tokens: int | None = None
    replayable: bool = False
    shard_count: int = 1

    def __post_init__(self) -> None:
        if not self.group_id:
            raise CacheConfigError("group_id must not be empty")
        self._check_shape()
        self._check_retention()
        if self.shard_count < 1:
            raise self._error(f"shard_count must be at least 1, got {self.shard_count}")

    def _check_shape(self) -> None:
        row_geometry = {"rows_per_page": self.rows_per_page, "entry_stride_tokens": self.entry_stride_tokens}
        snapshot = {"checkpoint_granularity": self.checkpoint_granularity}
        wanted, refused = (row_geometry, snapshot) if self.family is CacheFamily.HISTORY else (snapshot, row_geometry)
        for name, value in wanted.items():
            if value is None or value < 1:
                raise self._error(f"a {self.family} group needs a positive {name}, got {value}")
        for name, value in refused.items():
            if value is not None:
                raise self._error(f"a {self.family} group has no {name}, got {value}")

    def _check_retention(self) -> None:
        sliding = self.retention is CacheRetention.SLIDING_WINDOW
        if sliding and self.family is CacheFamily.STATE:
            raise self._error(f"a state group retains full_history, got retention {self.retention}")
        if sliding and (self.sliding_window_tokens is None or self.sliding_window_tokens < 1):
            raise self._error(f"needs a positive sliding_window_tokens, got {self.sliding_window_tokens}")
        if not sliding and self.sliding_window_tokens is not None:
            raise self._error(f"full_history has no sliding_window_tokens, got {self.sliding_window_tokens}")
        if self.replayable and not sliding:
            raise self._error(f"replayable needs retention sliding_window, got {self.retention}")

    def _error(self, message: str) -> CacheConfigError:
        return CacheConfigError(f'group "{self.group_id}": {message}')

    @property
    def page_size(self) -> int:
        """Tokens covered by one page of rows. Raises TypeError for a state group, which has no rows."""
        if self.rows_per_page is None or self.entry_stride_tokens is None:
            raise TypeError(f'group "{self.group_id}": a state group has no page_size, read checkpoint_granularity')
        return self.rows_per_page * self.entry_stride_tokens

    @property
    def block_granularity(self) -> int:
        """Tokens covered by one block-table slot, whichever shape declares it."""
        return self.page_size if self.checkpoint_granularity is None else self.checkpoint_granularity


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFieldSpec:
    """One tensor per block of the declaring group.

    `block_shape` is one block on this rank, rows first for history groups ([rows, num_kv_heads, head_dim]).
    `partition_axis` is the axis of `block_shape` that tensor ranks split; None: replicated. `partition_sections` say
    what that axis is made of over all ranks; none: heads of one element, all of them on this rank.
    Raises CacheConfigError naming the field id.
    """

    field_id: str
    dtype: str
    block_shape: tuple[int, ...]
    partition_axis: int | None = None
    partition_sections: tuple[HeadSection, ...] = ()

    def __post_init__(self) -> None:
        if not self.field_id:
            raise CacheConfigError("field_id must not be empty")
        if self.dtype not in DTYPE_BYTES:
            raise CacheConfigError(
                f'field "{self.field_id}": dtype must be one of {", ".join(DTYPE_BYTES)}, got "{self.dtype}"'
            )
        if not self.block_shape or min(self.block_shape) < 1:
            raise CacheConfigError(
                f'field "{self.field_id}": block_shape needs positive dimensions, got {self.block_shape}'
            )
        axis, rank = self.partition_axis, len(self.block_shape)
        if axis is not None and not 0 <= axis < rank:
            raise CacheConfigError(f'field "{self.field_id}": partition_axis must be in [0, {rank}), got {axis}')
        if axis is None and self.partition_sections:
            raise CacheConfigError(f'field "{self.field_id}": partition_sections need a partition_axis')

    @classmethod
    def partitioned(
        cls,
        *,
        field_id: str,
        dtype: str,
        global_shape: tuple[int, ...],
        axis: int,
        sections: tuple[HeadSection, ...],
        rank: TensorRank,
    ) -> CacheFieldSpec:
        """A rank's part of a field of `global_shape` over all ranks, whose `axis` consists of `sections`.

        Raises CacheConfigError naming the field when the heads do not share out.
        """
        if sum(section.extent for section in sections) != global_shape[axis]:
            raise CacheConfigError(
                f'field "{field_id}": its sections have {sum(section.extent for section in sections)} elements, axis '
                f"{axis} of {global_shape} has {global_shape[axis]}"
            )
        try:
            extent = sum(section.extent_on(rank) for section in sections)
        except CacheConfigError as error:
            raise CacheConfigError(f'field "{field_id}": {error}') from error
        return cls(
            field_id=field_id,
            dtype=dtype,
            block_shape=(*global_shape[:axis], extent, *global_shape[axis + 1 :]),
            partition_axis=axis,
            partition_sections=sections,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this field, without padding."""
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerField:
    """A parsed layer field id: which layer, which of its tensors."""

    layer: int
    name: str


GroupDeclaration = tuple[CacheGroupSpec, tuple[CacheFieldSpec, ...]]
"""One group and the fields that deposit bytes in it."""


def layer_field_id(layer: int, name: str) -> str:
    """Id of a layer's cache field, e.g. `layers.3.k`."""
    return f"layers.{layer}.{name}"


def parse_layer_field_id(field_id: str) -> LayerField | None:
    """Inverse of `layer_field_id`; None for a field that belongs to no layer."""
    match = _LAYER_FIELD.fullmatch(field_id)
    return None if match is None else LayerField(layer=int(match[1]), name=match[2])


def check_row_field(spec: CacheGroupSpec, field_id: str, block_shape: tuple[int, ...]) -> None:
    """Raises CacheConfigError unless a block of the field is the group's rows, first axis first."""
    if block_shape[0] != spec.rows_per_page:
        raise CacheConfigError(
            f'field "{field_id}": block_shape {block_shape} does not start with the rows of group "{spec.group_id}" '
            f"(rows_per_page {spec.rows_per_page})"
        )
