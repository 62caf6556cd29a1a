"""Where the fields of one group lie in the planes of a parent: rows side by side, state wherever there is room.

Knows one group at a time, and not how a parent is chosen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cache_runtime.recipes.spec import DTYPE_BYTES, CacheFieldSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSlot:
    """Where the blocks of a group keep one field: a plane, and bytes from the beginning of a block's stride in it."""

    plane: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPacking:
    """One group's share of a parent: blocks per parent, and a slot for each field in order of declaration."""

    cache_blocks_per_lcm_block: int
    slots: tuple[PlaneSlot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """How the fields of a group of rows share planes: `planes` lists the field indices of each, equal in size."""

    interleave: int
    planes: tuple[tuple[int, ...], ...]
    field_bytes: tuple[int, ...]

    @classmethod
    def interleaved(cls, fields: Sequence[CacheFieldSpec], interleave: int) -> RowShape:
        sizes = tuple(field.block_bytes for field in fields)
        by_size: dict[int, list[int]] = {}
        for index, size in enumerate(sizes):
            by_size.setdefault(size, []).append(index)
        planes = tuple(
            tuple(indices[begin : begin + interleave])
            for indices in by_size.values()
            for begin in range(0, len(indices), interleave)
        )
        return cls(interleave=interleave, planes=planes, field_bytes=sizes)

    @property
    def dominant_bytes(self) -> int:
        """The field size that makes up most of a block."""
        totals: Counter[int] = Counter()
        for size in self.field_bytes:
            totals[size] += size
        return max(totals, key=lambda size: (totals[size], size))

    def plane_bytes(self, num_blocks: int) -> list[int]:
        """Bytes of each of `planes` in a parent of `num_blocks` blocks."""
        return [num_blocks * self.interleave * self.field_bytes[members[0]] for members in self.planes]

    def place(self, num_blocks: int, plane_bytes: Sequence[int]) -> GroupPacking:
        """A block after the other in its planes, of which `plane_bytes` has one of each size that is needed."""
        free: dict[int, list[int]] = {}
        for plane, size in reversed(list(enumerate(plane_bytes))):
            free.setdefault(size, []).append(plane)
        slots: dict[int, PlaneSlot] = {}
        for members, size in zip(self.planes, self.plane_bytes(num_blocks), strict=True):
            plane = free[size].pop()
            for position, index in enumerate(members):
                slots[index] = PlaneSlot(plane=plane, offset_bytes=position * self.field_bytes[index])
        return GroupPacking(
            cache_blocks_per_lcm_block=num_blocks, slots=tuple(slots[index] for index in range(len(slots)))
        )


def interleave_within(fields_of_size: Collection[int], num_planes: int) -> int:
    """The least number of fields to a plane that takes at most `num_planes`, or one plane per size where that is more.

    `fields_of_size`: how many fields there are of each size.
    """
    most = max(fields_of_size)
    return next((c for c in range(1, most) if sum(-(-number // c) for number in fields_of_size) <= num_planes), most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """Bytes of each plane of a parent, and how many there are of each size."""

    sizes: tuple[int, ...]
    num_of_size: Mapping[int, int]
    num_bytes: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Planes:
        return cls(sizes=tuple(sizes), num_of_size=Counter(sizes), num_bytes=sum(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFields:
    """The fields of a group of state. `by_size` lists them as they are placed: the largest first."""

    fields: tuple[CacheFieldSpec, ...]
    by_size: tuple[int, ...]
    block_bytes: int
    largest_bytes: int
    element_bytes: int

    @classmethod
    def of(cls, fields: Sequence[CacheFieldSpec]) -> StateFields:
        sizes = [field.block_bytes for field in fields]
        return cls(
            fields=tuple(fields),
            by_size=tuple(sorted(range(len(fields)), key=lambda index: (-sizes[index], index))),
            block_bytes=sum(sizes),
            largest_bytes=max(sizes),
            element_bytes=math.lcm(*(DTYPE_BYTES[field.dtype] for field in fields)),
        )

    def most_blocks(self, planes: Planes) -> int:
        """No more blocks than this fit: together into all planes, with their largest field into one."""
        return min(planes.num_bytes // self.block_bytes, max(planes.sizes) // self.largest_bytes)

    def place(self, num_blocks: int, planes: Planes) -> GroupPacking | None:
        """Largest fields first, each into the first plane with room; None when one finds none."""
        unit_bytes = num_blocks * self.element_bytes
        room_bytes = {size: size // num_blocks for size in planes.num_of_size if size % unit_bytes == 0}
        if sum(room * planes.num_of_size[size] for size, room in room_bytes.items()) < self.block_bytes:
            return None
        used_bytes = [0] * len(planes.sizes)
        slots: dict[int, PlaneSlot] = {}
        last: tuple[int, str] | None = None
        plane = 0
        for index in self.by_size:
            field = self.fields[index]
            if (field.block_bytes, field.dtype) != last:
                # Where one field found no room, its likes find none either.
                last, plane = (field.block_bytes, field.dtype), 0
            while plane < len(planes.sizes):
                begin = align_up(used_bytes[plane], DTYPE_BYTES[field.dtype])
                if begin + field.block_bytes <= room_bytes.get(planes.sizes[plane], 0):
                    break
                plane += 1
            else:
                return None
            slots[index] = PlaneSlot(plane=plane, offset_bytes=begin)
            used_bytes[plane] = begin + field.block_bytes
        return GroupPacking(
            cache_blocks_per_lcm_block=num_blocks, slots=tuple(slots[index] for index in range(len(slots)))
        )


def align_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
