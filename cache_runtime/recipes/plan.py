"""pack and bind: from declared groups to the byte layout of one LCM parent, and from there to a whole arena.

Torch-free, because a `CacheMemoryPlan` travels to peers. Knows no device, model or scheduler object.

Geometry. A parent spans `plane_bytes[j]` in each plane j; all parents of a plane are contiguous and parent 0 is the
null parent. Groups time-share the planes: while a group is bound to a parent, its `cache_blocks_per_lcm_block` (k)
blocks divide every plane into k equal strides, and each field of the group has a slot: a plane, and an offset inside
the stride. Block `1 + (parent - 1) * k + slot` of any group therefore lies at `offset + id * stride` with `offset =
plane base + plane_bytes - stride + slot offset`: the null block 0 is the last stride of the null parent, and a group's
blocks need no parent arithmetic to be addressed. `packing.solve_packing` chooses planes and slots.
"""

from __future__ import annotations

import bisect
import itertools
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
from cache_runtime.recipes.packing import solve_packing
from cache_runtime.recipes.plane_slots import PlaneSlot
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
    """One group's share of an LCM parent: its fields, the slot of each, and how many blocks a parent holds."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    spec: CacheGroupSpec
    fields: tuple[CacheFieldSpec, ...]
    slots: tuple[PlaneSlot, ...]
    cache_blocks_per_lcm_block: int

    def __post_init__(self) -> None:
        if not self.fields:
            raise CacheConfigError(f'group "{self.spec.group_id}": declares no fields')
        if len(self.slots) != len(self.fields):
            raise CacheConfigError(
                f'group "{self.spec.group_id}": {len(self.slots)} slots for {len(self.fields)} fields'
            )
        if self.cache_blocks_per_lcm_block < 1:
            raise CacheConfigError(
                f'group "{self.spec.group_id}": cache_blocks_per_lcm_block must be at least 1, '
                f"got {self.cache_blocks_per_lcm_block}"
            )

    @property
    def group_id(self) -> str:
        return self.spec.group_id

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all fields, padding excluded."""
        return sum(field.block_bytes for field in self.fields)

    @property
    def virtual_blocks_per_lcm_block(self) -> int:
        """Blocks of one parent on all context ranks together; what the scheduler counts."""
        return self.cache_blocks_per_lcm_block * self.spec.shard_count

    @property
    def payload_bytes_per_lcm_block(self) -> int:
        """Bytes of a parent that this group fills, padding excluded."""
        return self.cache_blocks_per_lcm_block * self.block_bytes


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
        num_planes = 1 + max(slot.plane for group in self.groups for slot in group.slots)
        if len(self.plane_bytes) != num_planes:
            raise CacheConfigError(f"plane_bytes names {len(self.plane_bytes)} planes, the groups need {num_planes}")
        for group in self.groups:
            _check_block_granularity(group.spec, self.prefix_granularity)
            _check_slots(group, self.plane_bytes)
            _check_row_distance(group, self.plane_bytes)

    @property
    def lcm_block_bytes(self) -> int:
        """Bytes of one LCM parent over all planes."""
        return sum(self.plane_bytes)

    def padding_bytes(self, group: CacheGroupLayout) -> int:
        """Bytes of a parent that stay empty while it is bound to the group."""
        return self.lcm_block_bytes - group.payload_bytes_per_lcm_block

    def block_stride_bytes(self, group: CacheGroupLayout, slot: PlaneSlot) -> int:
        """Bytes from one block of the group to the next in the slot's plane."""
        return self.plane_bytes[slot.plane] // group.cache_blocks_per_lcm_block

    def block_stride_rows(self, group: CacheGroupLayout) -> int:
        """Rows from one block to the next, the same in every field; those between belong to the group's other fields.

        Raises TypeError for a state group, which has no rows.
        """
        if group.spec.rows_per_page is None:
            raise TypeError(f'group "{group.group_id}": a state group has no rows')
        blocks_per_stride = self.block_stride_bytes(group, group.slots[0]) // group.fields[0].block_bytes
        return group.spec.rows_per_page * blocks_per_stride

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
        """Parents that hold a single prefix grain in every group."""
        grain = self.prefix_granularity
        return sum(
            math.ceil(grain // group.spec.block_granularity / group.virtual_blocks_per_lcm_block)
            for group in self.groups
        )

    def token_capacity(self, num_lcm_blocks: int) -> int:
        """Tokens that `num_lcm_blocks` parents hold in all full-history groups at once, in whole prefix grains."""
        parents_per_token = sum(
            (
                Fraction(1, group.spec.block_granularity * group.virtual_blocks_per_lcm_block)
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

    @cached_property
    def fields(self) -> tuple[CacheFieldLayout, ...]:
        """Every field of every group, in declaration order."""
        offsets = self.layout.plane_offsets_bytes(self.num_lcm_blocks)
        return tuple(
            self._place(group, field, slot, offsets[slot.plane])
            for group in self.layout.groups
            for field, slot in zip(group.fields, group.slots, strict=True)
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
        self, group: CacheGroupLayout, field: CacheFieldSpec, slot: PlaneSlot, plane_offset_bytes: int
    ) -> CacheFieldLayout:
        stride_bytes = self.layout.block_stride_bytes(group, slot)
        null_block_bytes = plane_offset_bytes + self.layout.plane_bytes[slot.plane] - stride_bytes
        return CacheFieldLayout(
            field_id=field.field_id,
            group_id=group.group_id,
            dtype=field.dtype,
            block_shape=field.block_shape,
            partition_axis=field.partition_axis,
            offset_bytes=null_block_bytes + slot.offset_bytes,
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
    for spec, fields in declarations:
        if not fields:
            raise CacheConfigError(f'group "{spec.group_id}": declares no fields')
    parent = solve_packing(declarations, max_padding_fraction=max_padding_fraction, packing=packing)
    layout = CacheLayout(
        prefix_granularity=prefix_granularity,
        alignment_bytes=alignment_bytes,
        plane_bytes=parent.plane_bytes,
        groups=tuple(
            CacheGroupLayout(
                spec=spec,
                fields=fields,
                slots=group.slots,
                cache_blocks_per_lcm_block=group.cache_blocks_per_lcm_block,
            )
            for (spec, fields), group in zip(declarations, parent.groups, strict=True)
        ),
    )
    _check_padding(layout, max_padding_fraction)
    return layout


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


def _check_slots(group: CacheGroupLayout, plane_bytes: Sequence[int]) -> None:
    """Every stride is whole elements, every slot lies inside it, and no two slots of the group share a byte."""
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for field, slot in zip(group.fields, group.slots, strict=True):
        where = f'group "{group.group_id}" field "{field.field_id}"'
        if slot.plane < 0 or slot.offset_bytes < 0:
            raise CacheConfigError(f"{where}: plane {slot.plane} and offset_bytes {slot.offset_bytes} must be positive")
        span_bytes, num_blocks = plane_bytes[slot.plane], group.cache_blocks_per_lcm_block
        stride_bytes, rest_bytes = divmod(span_bytes, num_blocks)
        end_bytes = slot.offset_bytes + field.block_bytes
        element_bytes = DTYPE_BYTES[field.dtype]
        if rest_bytes or stride_bytes < end_bytes or stride_bytes % element_bytes or slot.offset_bytes % element_bytes:
            raise CacheConfigError(
                f"{where}: {num_blocks} blocks of {field.block_bytes} bytes at offset_bytes {slot.offset_bytes} do not "
                f"split a plane of {span_bytes} bytes evenly"
            )
        taken.setdefault(slot.plane, []).append((slot.offset_bytes, end_bytes, field.field_id))
    for spans in taken.values():
        spans.sort()
        for (_, end_bytes, first), (begin_bytes, _, second) in itertools.pairwise(spans):
            if begin_bytes < end_bytes:
                raise CacheConfigError(f'group "{group.group_id}": fields "{first}" and "{second}" overlap')


def _check_row_distance(group: CacheGroupLayout, plane_bytes: Sequence[int]) -> None:
    """One table addresses the rows of all fields of a group, so blocks must be equally many rows apart in each."""
    if group.spec.family is not CacheFamily.HISTORY:
        return
    distances: dict[int, str] = {}
    for field, slot in zip(group.fields, group.slots, strict=True):
        stride_bytes = plane_bytes[slot.plane] // group.cache_blocks_per_lcm_block
        blocks_per_stride, rest_bytes = divmod(stride_bytes, field.block_bytes)
        if rest_bytes:
            raise CacheConfigError(
                f'group "{group.group_id}" field "{field.field_id}": rows need strides of whole blocks, but a block '
                f"has {field.block_bytes} bytes and its stride is {stride_bytes} bytes"
            )
        distances.setdefault(blocks_per_stride, field.field_id)
    if len(distances) > 1:
        (first, first_id), (second, second_id), *_ = distances.items()
        raise CacheConfigError(
            f'group "{group.group_id}": rows need one stride, but it is {first} blocks for field "{first_id}" and '
            f'{second} for field "{second_id}"'
        )


def _check_padding(layout: CacheLayout, max_padding_fraction: float) -> None:
    for group in layout.groups:
        padding_bytes = layout.padding_bytes(group)
        if padding_bytes > max_padding_fraction * layout.lcm_block_bytes:
            raise CacheConfigError(
                f'group "{group.group_id}": wastes {padding_bytes} of {layout.lcm_block_bytes} bytes per LCM block, '
                f"more than max_padding_fraction {max_padding_fraction}"
            )


def _align_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
