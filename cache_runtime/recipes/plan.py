"""pack and bind: from declared groups to the byte layout of one LCM parent, and from there to a whole arena.

Torch-free, because a `CacheMemoryPlan` travels to peers. Knows no device, model or scheduler object.

Geometry. Field j of every group lives in plane j, so groups time-share the planes of a parent. In plane j a parent
spans `plane_bytes[j]`, which holds `cache_blocks_per_lcm_block` (k) equal block strides of whichever group is bound to
it. All parents of a plane are contiguous; parent 0 is the null parent. Block `1 + (parent - 1) * k + slot` of any
group therefore lies at `offset + id * stride` with `offset = plane base + plane_bytes - stride`: the null block 0 is
the last stride of the null parent, and a group's blocks need no parent arithmetic to be addressed.
"""

from __future__ import annotations

import bisect
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from cache_runtime.errors import CacheConfigError, UnknownFieldError, UnknownGroupError
from cache_runtime.recipes.spec import (
    DTYPE_BYTES,
    CacheFamily,
    CacheFieldSpec,
    CacheGroupSpec,
    CacheRetention,
    GroupDeclaration,
)

ARENA_ALIGNMENT_BYTES = 4096
"""Default alignment of the arena and of every plane: one memory page, what data planes register."""

MAX_SOLVED_PACKING = 64
"""Largest number of blocks per LCM parent that `pack` chooses by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFieldLayout:
    """One field inside a bound plan: where its blocks are, in bytes from the arena base.

    Block i occupies [offset_bytes + i * block_stride_bytes, + block_bytes) for i in [0, num_blocks).
    """

    field_id: str
    group_id: str
    dtype: str
    block_shape: tuple[int, ...]
    partition_axis: int | None
    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroupLayout:
    """One group's share of an LCM parent: its fields (field j in plane j) and how many blocks a parent holds."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    spec: CacheGroupSpec
    fields: tuple[CacheFieldSpec, ...]
    cache_blocks_per_lcm_block: int

    def __post_init__(self) -> None:
        if not self.fields:
            raise CacheConfigError(f'group "{self.spec.group_id}": declares no fields')
        if self.cache_blocks_per_lcm_block < 1:
            raise CacheConfigError(
                f'group "{self.spec.group_id}": cache_blocks_per_lcm_block must be at least 1, '
                f"got {self.cache_blocks_per_lcm_block}"
            )

    @property
    def group_id(self) -> str:
        return self.spec.group_id

    @property
    def payload_bytes_per_lcm_block(self) -> int:
        """Bytes of a parent that this group fills, padding excluded."""
        return self.cache_blocks_per_lcm_block * sum(field.block_bytes for field in self.fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """How one LCM parent is laid out; independent of how many parents there are.

    `plane_bytes[j]` is the span of one parent in plane j. Raises CacheConfigError on any inconsistency, because a
    layout may come from a peer.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    prefix_granularity: int
    alignment_bytes: int
    plane_bytes: tuple[int, ...]
    groups: tuple[CacheGroupLayout, ...]

    def __post_init__(self) -> None:
        if self.prefix_granularity < 1:
            raise CacheConfigError(f"prefix_granularity must be at least 1, got {self.prefix_granularity}")
        if self.alignment_bytes < 1 or self.alignment_bytes & (self.alignment_bytes - 1):
            raise CacheConfigError(f"alignment_bytes must be a power of two, got {self.alignment_bytes}")
        if not self.groups:
            raise CacheConfigError("a cache layout needs at least one group")
        _check_unique("group_id", [group.group_id for group in self.groups])
        _check_unique("field_id", [field.field_id for group in self.groups for field in group.fields])
        num_planes = max(len(group.fields) for group in self.groups)
        if len(self.plane_bytes) != num_planes:
            raise CacheConfigError(f"plane_bytes names {len(self.plane_bytes)} planes, the groups need {num_planes}")
        for group in self.groups:
            _check_block_granularity(group.spec, self.prefix_granularity)
            _check_planes(group, self.plane_bytes)

    @property
    def lcm_block_bytes(self) -> int:
        """Bytes of one LCM parent over all planes."""
        return sum(self.plane_bytes)

    def num_arena_bytes(self, num_lcm_blocks: int) -> int:
        """Bytes of an arena with `num_lcm_blocks` usable parents: each plane aligned, the null parent included."""
        return sum(self._plane_span_bytes(plane, num_lcm_blocks) for plane in range(len(self.plane_bytes)))

    def plane_offsets_bytes(self, num_lcm_blocks: int) -> tuple[int, ...]:
        """Bytes from the arena base to each plane's null parent."""
        offsets = [0]
        for plane in range(len(self.plane_bytes) - 1):
            offsets.append(offsets[-1] + self._plane_span_bytes(plane, num_lcm_blocks))
        return tuple(offsets)

    def num_lcm_blocks_within(self, memory_bytes: int) -> int:
        """Largest number of usable parents whose arena fits `memory_bytes`; -1 when not even the null parent does."""
        limit = memory_bytes // self.lcm_block_bytes + 1
        return bisect.bisect_right(range(limit), memory_bytes, key=self.num_arena_bytes) - 1

    def parents_per_prefix_grain(self) -> int:
        """Parents one request needs to hold a single prefix grain in every full-history group."""
        grain = self.prefix_granularity
        return sum(
            math.ceil(grain // group.spec.block_granularity / group.cache_blocks_per_lcm_block)
            for group in self._full_history_groups()
        )

    def token_capacity(self, num_lcm_blocks: int) -> int:
        """Tokens that `num_lcm_blocks` parents hold in all full-history groups at once, in whole prefix grains."""
        parents_per_token = sum(
            (
                Fraction(1, group.spec.block_granularity * group.cache_blocks_per_lcm_block)
                for group in self._full_history_groups()
            ),
            start=Fraction(0),
        )
        if not parents_per_token:
            return 0
        return int(num_lcm_blocks / parents_per_token) // self.prefix_granularity * self.prefix_granularity

    def bind(self, num_lcm_blocks: int) -> CacheMemoryPlan:
        """The plan of an arena with `num_lcm_blocks` usable parents (the null parent comes on top)."""
        return CacheMemoryPlan(layout=self, num_lcm_blocks=num_lcm_blocks)

    def _plane_span_bytes(self, plane: int, num_lcm_blocks: int) -> int:
        return _align_up((num_lcm_blocks + 1) * self.plane_bytes[plane], self.alignment_bytes)

    def _full_history_groups(self) -> tuple[CacheGroupLayout, ...]:
        return tuple(
            group
            for group in self.groups
            if group.spec.family is CacheFamily.HISTORY and group.spec.retention is CacheRetention.FULL_HISTORY
        )


@dataclass(frozen=True, kw_only=True)
class CacheMemoryPlan:
    """What an arena allocates from and what a peer is told: a layout and a number of usable parents.

    Everything else is derived, so two views cannot disagree. Not slotted, unlike its parts, to keep the derived field
    table after its first use.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    layout: CacheLayout
    num_lcm_blocks: int

    def __post_init__(self) -> None:
        if self.num_lcm_blocks < 1:
            raise CacheConfigError(f"num_lcm_blocks must be at least 1, got {self.num_lcm_blocks}")

    @property
    def prefix_granularity(self) -> int:
        """Tokens; the grain at which prefixes are hashed and matched."""
        return self.layout.prefix_granularity

    @property
    def groups(self) -> tuple[CacheGroupSpec, ...]:
        return tuple(group.spec for group in self.layout.groups)

    @property
    def num_arena_bytes(self) -> int:
        return self.layout.num_arena_bytes(self.num_lcm_blocks)

    @property
    def token_capacity(self) -> int:
        """Tokens the whole arena holds, in whole prefix grains."""
        return self.layout.token_capacity(self.num_lcm_blocks)

    @cached_property
    def fields(self) -> tuple[CacheFieldLayout, ...]:
        """Every field of every group, in declaration order."""
        offsets = self.layout.plane_offsets_bytes(self.num_lcm_blocks)
        return tuple(
            self._place(group, plane, field, offsets[plane])
            for group in self.layout.groups
            for plane, field in enumerate(group.fields)
        )

    @cached_property
    def _field_by_id(self) -> dict[str, CacheFieldLayout]:
        return {field.field_id: field for field in self.fields}

    def field(self, field_id: str) -> CacheFieldLayout:
        """Raises UnknownFieldError."""
        try:
            return self._field_by_id[field_id]
        except KeyError:
            raise UnknownFieldError(f'field "{field_id}" is not in the memory plan') from None

    def group_layout(self, group_id: str) -> CacheGroupLayout:
        """Raises UnknownGroupError."""
        for group in self.layout.groups:
            if group.group_id == group_id:
                return group
        known = ", ".join(group.group_id for group in self.layout.groups)
        raise UnknownGroupError(f'group "{group_id}" is not in the memory plan (groups: {known})')

    def num_blocks(self, group_id: str) -> int:
        """Addressable blocks of a group on this rank, the null block 0 included."""
        return self.num_lcm_blocks * self.group_layout(group_id).cache_blocks_per_lcm_block + 1

    def to_dict(self) -> dict[str, object]:
        """JSON-compatible form; `from_dict` of it equals this plan."""
        encoded: dict[str, object] = _PLAN_CODEC.dump_python(self, mode="json")
        return encoded

    @classmethod
    def from_dict(cls, encoded: Mapping[str, object]) -> CacheMemoryPlan:
        """Raises CacheConfigError naming the first bad entry; `encoded` is not trusted."""
        try:
            return _PLAN_CODEC.validate_json(json.dumps(encoded), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise CacheConfigError(f"cache memory plan: {where or 'plan'}: {first['msg']}") from error
        except (TypeError, ValueError) as error:
            raise CacheConfigError(f"cache memory plan is not JSON: {error}") from error

    def _place(
        self, group: CacheGroupLayout, plane: int, field: CacheFieldSpec, plane_offset_bytes: int
    ) -> CacheFieldLayout:
        plane_bytes = self.layout.plane_bytes[plane]
        stride_bytes = plane_bytes // group.cache_blocks_per_lcm_block
        return CacheFieldLayout(
            field_id=field.field_id,
            group_id=group.group_id,
            dtype=field.dtype,
            block_shape=field.block_shape,
            partition_axis=field.partition_axis,
            offset_bytes=plane_offset_bytes + plane_bytes - stride_bytes,
            block_stride_bytes=stride_bytes,
            block_bytes=field.block_bytes,
            num_blocks=self.num_lcm_blocks * group.cache_blocks_per_lcm_block + 1,
        )


_PLAN_CODEC = TypeAdapter(CacheMemoryPlan)


def pack(
    declarations: Sequence[GroupDeclaration],
    *,
    prefix_granularity: int,
    alignment_bytes: int = ARENA_ALIGNMENT_BYTES,
    max_padding_fraction: float = 0.0,
    packing: Mapping[str, int] | None = None,
) -> CacheLayout:
    """Lay out one LCM parent for the declared groups.

    `packing` fixes the blocks per parent of each group by id; None solves them from the groups' block bytes.
    Raises CacheConfigError naming the group and both values when a group would waste more than `max_padding_fraction`
    of a parent.
    """
    if not declarations:
        raise CacheConfigError("a cache layout needs at least one group")
    solved = _solve_packing(declarations) if packing is None else packing
    groups = tuple(
        CacheGroupLayout(spec=spec, fields=fields, cache_blocks_per_lcm_block=_packing_of(spec.group_id, solved))
        for spec, fields in declarations
    )
    num_planes = max(len(group.fields) for group in groups)
    layout = CacheLayout(
        prefix_granularity=prefix_granularity,
        alignment_bytes=alignment_bytes,
        plane_bytes=tuple(_plane_bytes(groups, plane) for plane in range(num_planes)),
        groups=groups,
    )
    _check_padding(layout, max_padding_fraction)
    return layout


def _solve_packing(declarations: Sequence[GroupDeclaration]) -> dict[str, int]:
    """Blocks per parent so that every group fills the parent exactly, or nearly when that parent would be too large."""
    block_bytes = {spec.group_id: sum(field.block_bytes for field in fields) for spec, fields in declarations}
    if min(block_bytes.values()) < 1:
        return dict.fromkeys(block_bytes, 1)
    parent_bytes = math.lcm(*block_bytes.values())
    if parent_bytes // min(block_bytes.values()) > MAX_SOLVED_PACKING:
        parent_bytes = max(block_bytes.values())
    return {group_id: parent_bytes // num_bytes for group_id, num_bytes in block_bytes.items()}


def _packing_of(group_id: str, packing: Mapping[str, int]) -> int:
    if group_id not in packing:
        raise CacheConfigError(f'group "{group_id}": packing names no cache_blocks_per_lcm_block for it')
    return packing[group_id]


def _plane_bytes(groups: Sequence[CacheGroupLayout], plane: int) -> int:
    """Smallest parent span of a plane that every group splits into equal strides of whole elements."""
    tenants = [(group.cache_blocks_per_lcm_block, group.fields[plane]) for group in groups if plane < len(group.fields)]
    payload_bytes = max(packing * field.block_bytes for packing, field in tenants)
    return _align_up(payload_bytes, math.lcm(*(packing * DTYPE_BYTES[field.dtype] for packing, field in tenants)))


def _check_unique(name: str, values: Sequence[str]) -> None:
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise CacheConfigError(f'{name} "{repeated[0]}" is declared more than once')


def _check_block_granularity(spec: CacheGroupSpec, prefix_granularity: int) -> None:
    if prefix_granularity % spec.block_granularity:
        raise CacheConfigError(
            f'group "{spec.group_id}": block_granularity {spec.block_granularity} must divide '
            f"prefix_granularity {prefix_granularity}"
        )


def _check_planes(group: CacheGroupLayout, plane_bytes: Sequence[int]) -> None:
    for field, span_bytes in zip(group.fields, plane_bytes, strict=False):
        stride_bytes, rest_bytes = divmod(span_bytes, group.cache_blocks_per_lcm_block)
        if rest_bytes or stride_bytes < field.block_bytes or stride_bytes % DTYPE_BYTES[field.dtype]:
            raise CacheConfigError(
                f'group "{group.group_id}" field "{field.field_id}": {group.cache_blocks_per_lcm_block} blocks of '
                f"{field.block_bytes} bytes do not split a plane of {span_bytes} bytes evenly"
            )
        # Paged kernels address rows of all blocks as one flat buffer, which a gap between blocks would break.
        if group.spec.family is CacheFamily.HISTORY and stride_bytes != field.block_bytes:
            raise CacheConfigError(
                f'group "{group.group_id}" field "{field.field_id}": rows need gapless blocks, but a block has '
                f"{field.block_bytes} bytes and its stride is {stride_bytes} bytes"
            )


def _check_padding(layout: CacheLayout, max_padding_fraction: float) -> None:
    for group in layout.groups:
        padding_bytes = layout.lcm_block_bytes - group.payload_bytes_per_lcm_block
        if padding_bytes > max_padding_fraction * layout.lcm_block_bytes:
            raise CacheConfigError(
                f'group "{group.group_id}": wastes {padding_bytes} of {layout.lcm_block_bytes} bytes per LCM block, '
                f"more than max_padding_fraction {max_padding_fraction}"
            )


def _align_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
