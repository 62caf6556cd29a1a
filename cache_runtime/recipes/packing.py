"""Solving how one LCM parent is cut: plane sizes, the place of every field, and how many blocks of each group fit.

Pure arithmetic over block bytes; builds no layout and checks no bound beyond what it needs to choose.

Rows of a group must be addressable as one flat array per field with one row distance for the whole group, because all
its fields are read through one table. So a plane holds, for one group of rows, fields of one size only: `interleave` of
them side by side, the same number in every plane, and it is filled exactly. State has no rows and fits wherever there
is room. More planes mean longer stretches of one field, fewer planes mean less waste where groups have unlike numbers
of fields.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.spec import DTYPE_BYTES, CacheFamily, CacheFieldSpec, GroupDeclaration

MAX_SOLVED_PACKING = 256
"""Largest number of blocks per LCM parent that the solver chooses by itself."""


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
class ParentPacking:
    """A parent: bytes of each plane, and one packing per declared group."""

    plane_bytes: tuple[int, ...]
    groups: tuple[GroupPacking, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.plane_bytes)

    def worst_padding_fraction(self, declarations: Sequence[GroupDeclaration]) -> float:
        """The largest share of a parent that one of the groups leaves empty."""
        return max(
            1.0 - group.cache_blocks_per_lcm_block * _block_bytes(fields) / self.num_bytes
            for group, (_, fields) in zip(self.groups, declarations, strict=True)
        )


def solve_packing(
    declarations: Sequence[GroupDeclaration], *, max_padding_fraction: float, packing: Mapping[str, int] | None
) -> ParentPacking:
    """The smallest parent within the bound, with the most planes; without one, the parent that wastes least.

    `packing` fixes the blocks per parent by group id. Raises CacheConfigError naming the group when it leaves one out,
    or when no parent of up to MAX_SOLVED_PACKING blocks holds every group.
    """
    fixed = None if packing is None else [_fixed_packing(spec.group_id, packing) for spec, _ in declarations]
    within: ParentPacking | None = None
    closest: tuple[float, ParentPacking] | None = None
    for candidates in _shapes(declarations, fixed):
        for parent in candidates:
            if within is not None and _size(parent) >= _size(within):
                break  # the parents of one shape only grow
            worst = parent.worst_padding_fraction(declarations)
            if worst <= max_padding_fraction:
                within = parent
                break
            if closest is None or worst < closest[0]:
                closest = (worst, parent)
    if within is not None:
        return within
    if closest is None:
        raise _no_parent(declarations, fixed)
    return closest[1]


def _size(parent: ParentPacking) -> tuple[int, int]:
    return parent.num_bytes, -len(parent.plane_bytes)


def _shapes(declarations: Sequence[GroupDeclaration], fixed: Sequence[int] | None) -> Iterator[Iterator[ParentPacking]]:
    """Parents by number of planes, each shape's in ascending size."""
    row_groups = [index for index, (spec, _) in enumerate(declarations) if spec.family is CacheFamily.HISTORY]
    if not row_groups:
        yield iter((_state_parent(declarations, fixed),))
        return
    most_fields = max(len(declarations[index][1]) for index in row_groups)
    for num_planes in range(most_fields, 0, -1):
        shapes = {index: _RowShape.within(declarations[index][1], num_planes) for index in row_groups}
        yield _parents(declarations, shapes, fixed)


def _parents(
    declarations: Sequence[GroupDeclaration], shapes: Mapping[int, _RowShape], fixed: Sequence[int] | None
) -> Iterator[ParentPacking]:
    """The parents of one shape, multiples of the smallest whose planes all groups of rows fill exactly."""
    if fixed is not None:
        parent = _complete(declarations, shapes, {index: fixed[index] for index in shapes}, fixed)
        yield from () if parent is None else (parent,)
        return
    unit_bytes = math.lcm(*(shape.interleave * shape.dominant_bytes for shape in shapes.values()))
    per_unit = {i: unit_bytes // (shape.interleave * shape.dominant_bytes) for i, shape in shapes.items()}
    for scale in range(1, MAX_SOLVED_PACKING // max(per_unit.values()) + 1):
        parent = _complete(declarations, shapes, {i: count * scale for i, count in per_unit.items()}, None)
        if parent is not None:
            yield parent


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowShape:
    """How the fields of a group of rows share planes: `planes` lists the field indices of each, equal in size."""

    interleave: int
    planes: tuple[tuple[int, ...], ...]
    field_bytes: tuple[int, ...]

    @classmethod
    def within(cls, fields: Sequence[CacheFieldSpec], num_planes: int) -> _RowShape:
        """The shape of least interleave that takes at most `num_planes`, or one plane per size where that is more."""
        sizes = tuple(field.block_bytes for field in fields)
        by_size: dict[int, list[int]] = {}
        for index, size in enumerate(sizes):
            by_size.setdefault(size, []).append(index)
        most = max(len(indices) for indices in by_size.values())
        interleave = next(
            (
                count
                for count in range(1, most)
                if sum(-(-len(indices) // count) for indices in by_size.values()) <= num_planes
            ),
            most,
        )
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


def _complete(
    declarations: Sequence[GroupDeclaration],
    shapes: Mapping[int, _RowShape],
    blocks: Mapping[int, int],
    fixed: Sequence[int] | None,
) -> ParentPacking | None:
    """The parent of these row shapes with the groups of state fitted in; None when one of them finds no room."""
    plane_bytes = _common_planes([shape.plane_bytes(blocks[index]) for index, shape in shapes.items()])
    groups: list[GroupPacking] = []
    for index, (_, fields) in enumerate(declarations):
        if index in shapes:
            groups.append(_place_rows(shapes[index], blocks[index], plane_bytes))
            continue
        counts = range(MAX_SOLVED_PACKING, 0, -1) if fixed is None else (fixed[index],)
        fitted = next((found for count in counts if (found := _place_state(fields, count, plane_bytes))), None)
        if fitted is None:
            return None
        groups.append(fitted)
    return ParentPacking(plane_bytes=plane_bytes, groups=tuple(groups))


def _common_planes(wanted: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The fewest planes from which each of the lists can be taken, largest first."""
    counts: Counter[int] = Counter()
    for sizes in wanted:
        counts |= Counter(sizes)
    return tuple(sorted(counts.elements(), reverse=True))


def _place_rows(shape: _RowShape, num_blocks: int, plane_bytes: Sequence[int]) -> GroupPacking:
    free: dict[int, list[int]] = {}
    for plane, size in reversed(list(enumerate(plane_bytes))):
        free.setdefault(size, []).append(plane)
    slots: dict[int, PlaneSlot] = {}
    for members, size in zip(shape.planes, shape.plane_bytes(num_blocks), strict=True):
        plane = free[size].pop()
        for position, index in enumerate(members):
            slots[index] = PlaneSlot(plane=plane, offset_bytes=position * shape.field_bytes[index])
    return GroupPacking(cache_blocks_per_lcm_block=num_blocks, slots=tuple(slots[index] for index in range(len(slots))))


def _place_state(fields: Sequence[CacheFieldSpec], num_blocks: int, plane_bytes: Sequence[int]) -> GroupPacking | None:
    """Largest fields first, each into the first plane with room; None when one finds none."""
    if num_blocks * _block_bytes(fields) > sum(plane_bytes):
        return None
    element_bytes = math.lcm(*(DTYPE_BYTES[field.dtype] for field in fields))
    usable = [size % (num_blocks * element_bytes) == 0 for size in plane_bytes]
    used = [0] * len(plane_bytes)
    slots: dict[int, PlaneSlot] = {}
    for index in sorted(range(len(fields)), key=lambda item: (-fields[item].block_bytes, item)):
        field = fields[index]
        for plane, size in enumerate(plane_bytes):
            begin = _align_up(used[plane], DTYPE_BYTES[field.dtype])
            if usable[plane] and begin + field.block_bytes <= size // num_blocks:
                slots[index] = PlaneSlot(plane=plane, offset_bytes=begin)
                used[plane] = begin + field.block_bytes
                break
        else:
            return None
    return GroupPacking(
        cache_blocks_per_lcm_block=num_blocks, slots=tuple(slots[index] for index in range(len(fields)))
    )


def _state_parent(declarations: Sequence[GroupDeclaration], fixed: Sequence[int] | None) -> ParentPacking:
    """Groups of state among themselves: field j of each in plane j, as large as the largest needs it."""
    counts = _state_counts([_block_bytes(fields) for _, fields in declarations]) if fixed is None else fixed
    num_planes = max(len(fields) for _, fields in declarations)
    plane_bytes = []
    for plane in range(num_planes):
        tenants = [
            (count, fields[plane])
            for count, (_, fields) in zip(counts, declarations, strict=True)
            if plane < len(fields)
        ]
        payload_bytes = max(count * field.block_bytes for count, field in tenants)
        unit_bytes = math.lcm(*(count * DTYPE_BYTES[field.dtype] for count, field in tenants))
        plane_bytes.append(_align_up(payload_bytes, unit_bytes))
    groups = tuple(
        GroupPacking(
            cache_blocks_per_lcm_block=count,
            slots=tuple(PlaneSlot(plane=plane, offset_bytes=0) for plane in range(len(fields))),
        )
        for count, (_, fields) in zip(counts, declarations, strict=True)
    )
    return ParentPacking(plane_bytes=tuple(plane_bytes), groups=groups)


def _state_counts(block_bytes: Sequence[int]) -> list[int]:
    """Blocks per parent so that every group fills it, or nearly when that parent would be too large."""
    parent_bytes = math.lcm(*block_bytes)
    if parent_bytes // min(block_bytes) > MAX_SOLVED_PACKING:
        parent_bytes = max(block_bytes)
    return [parent_bytes // num_bytes for num_bytes in block_bytes]


def _fixed_packing(group_id: str, packing: Mapping[str, int]) -> int:
    if group_id not in packing:
        raise CacheConfigError(f'group "{group_id}": packing names no cache_blocks_per_lcm_block for it')
    if packing[group_id] < 1:
        raise CacheConfigError(
            f'group "{group_id}": cache_blocks_per_lcm_block must be at least 1, got {packing[group_id]}'
        )
    return packing[group_id]


def _no_parent(declarations: Sequence[GroupDeclaration], fixed: Sequence[int] | None) -> CacheConfigError:
    limit = f"of up to {MAX_SOLVED_PACKING} blocks" if fixed is None else f"with the packing {list(fixed)}"
    sizes = ", ".join(f'"{spec.group_id}" with {_block_bytes(fields)} bytes' for spec, fields in declarations)
    return CacheConfigError(f"no LCM block {limit} holds a whole number of blocks of every group: {sizes} per block")


def _block_bytes(fields: Sequence[CacheFieldSpec]) -> int:
    return sum(field.block_bytes for field in fields)


def _align_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
