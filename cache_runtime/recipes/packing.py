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
from cache_runtime.recipes.plane_slots import (
    GroupPacking,
    Planes,
    PlaneSlot,
    RowShape,
    StateFields,
    align_up,
    interleave_within,
)
from cache_runtime.recipes.spec import DTYPE_BYTES, CacheFamily, CacheFieldSpec, GroupDeclaration

MAX_SOLVED_PACKING = 256
"""Largest number of blocks per LCM parent that the solver chooses by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentPacking:
    """A parent: bytes of each plane, and one packing per declared group."""

    plane_bytes: tuple[int, ...]
    groups: tuple[GroupPacking, ...]


def solve_packing(
    declarations: Sequence[GroupDeclaration], *, max_padding_fraction: float, packing: Mapping[str, int] | None
) -> ParentPacking:
    """The smallest parent within the bound, with the most planes; without one, the parent that wastes least.

    `packing` fixes the blocks per parent by group id. Raises CacheConfigError naming the group when it leaves one out,
    or when no parent of up to MAX_SOLVED_PACKING blocks holds every group.
    """
    fixed = None if packing is None else [_fixed_packing(spec.group_id, packing) for spec, _ in declarations]
    if all(spec.family is not CacheFamily.HISTORY for spec, _ in declarations):
        return _state_parent(declarations, fixed)
    search = _Search(declarations, max_padding_fraction, fixed)
    for shape in _shapes(declarations, fixed):
        search.look_at(shape)
    found = search.within or search.closest
    if found is None:
        raise _no_parent(declarations, fixed)
    return found.build()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParentShape:
    """Parents whose groups of rows lie in their planes in one way: the multiples of the smallest, up to a largest."""

    rows: Mapping[int, RowShape]
    num_blocks: Mapping[int, int]
    plane_bytes: tuple[int, ...]
    largest_scale: int

    @classmethod
    def of(cls, rows: Mapping[int, RowShape], num_blocks: Mapping[int, int], largest_scale: int) -> _ParentShape:
        planes = _common_planes([shape.plane_bytes(num_blocks[index]) for index, shape in rows.items()])
        return cls(rows=rows, num_blocks=num_blocks, plane_bytes=planes, largest_scale=largest_scale)

    @property
    def num_bytes(self) -> int:
        """Bytes of the smallest parent."""
        return sum(self.plane_bytes)

    @property
    def padding_fraction(self) -> float:
        """The largest share that one of the groups of rows leaves empty, of each of the parents."""
        return max(
            _padding_fraction(self.num_blocks[index] * sum(shape.field_bytes), self.num_bytes)
            for index, shape in self.rows.items()
        )


def _shapes(declarations: Sequence[GroupDeclaration], fixed: Sequence[int] | None) -> Iterator[_ParentShape]:
    """Those with more planes first."""
    fields_of = {i: fields for i, (spec, fields) in enumerate(declarations) if spec.family is CacheFamily.HISTORY}
    fields_of_size = [Counter(field.block_bytes for field in fields).values() for fields in fields_of.values()]
    most_fields = max(len(fields) for fields in fields_of.values())
    last_interleaves: list[int] = []
    for num_planes in range(most_fields, 0, -1):
        interleaves = [interleave_within(numbers, num_planes) for numbers in fields_of_size]
        if interleaves == last_interleaves:
            continue  # fewer planes do not fit, so these are the same ones
        last_interleaves = interleaves
        rows = {
            index: RowShape.interleaved(fields, interleave)
            for (index, fields), interleave in zip(fields_of.items(), interleaves, strict=True)
        }
        if fixed is not None:
            yield _ParentShape.of(rows, {index: fixed[index] for index in rows}, 1)
            continue
        unit_bytes = math.lcm(*(shape.interleave * shape.dominant_bytes for shape in rows.values()))
        num_blocks = {i: unit_bytes // (shape.interleave * shape.dominant_bytes) for i, shape in rows.items()}
        yield _ParentShape.of(rows, num_blocks, MAX_SOLVED_PACKING // max(num_blocks.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """One parent of a shape, and where in it the groups of state were fitted."""

    shape: _ParentShape
    scale: int
    states: Mapping[int, GroupPacking]
    padding_fraction: float

    @property
    def size(self) -> tuple[int, int]:
        return _size(self.shape, self.scale)

    def build(self) -> ParentPacking:
        plane_bytes = tuple(self.scale * size for size in self.shape.plane_bytes)
        rows = {
            index: shape.place(self.scale * self.shape.num_blocks[index], plane_bytes)
            for index, shape in self.shape.rows.items()
        }
        groups = {**rows, **self.states}
        return ParentPacking(plane_bytes=plane_bytes, groups=tuple(groups[index] for index in sorted(groups)))


def _size(shape: _ParentShape, scale: int) -> tuple[int, int]:
    """What a small parent has little of, the first before the second."""
    return scale * shape.num_bytes, -len(shape.plane_bytes)


class _Search:
    """Looks at one shape after another and keeps the smallest parent within the bound, or the one that wastes least.

    The groups of rows waste the same share of every parent of a shape. So a shape whose rows alone waste too much is
    left at once, and groups of state are fitted only where they can make a better parent than the one that is kept.
    """

    def __init__(
        self, declarations: Sequence[GroupDeclaration], max_padding_fraction: float, fixed: Sequence[int] | None
    ) -> None:
        self._states = {
            i: StateFields.of(fields)
            for i, (spec, fields) in enumerate(declarations)
            if spec.family is CacheFamily.STATE
        }
        self._max_padding_fraction = max_padding_fraction
        self._fixed = fixed
        self.within: _Candidate | None = None
        self.closest: _Candidate | None = None

    def look_at(self, shape: _ParentShape) -> None:
        of_rows = shape.padding_fraction
        for scale in range(1, shape.largest_scale + 1):
            if self.within is not None and _size(shape, scale) >= self.within.size:
                return  # the parents of one shape only grow
            if not self._is_wanted(of_rows):
                return
            found = self._fit_states(shape, scale, of_rows)
            if found is None or not self._is_wanted(found.padding_fraction):
                continue
            if found.padding_fraction <= self._max_padding_fraction:
                self.within = found
                return
            self.closest = found

    def _is_wanted(self, padding_fraction: float) -> bool:
        """Whether a parent that wastes so much would be kept, if it is small enough."""
        if padding_fraction <= self._max_padding_fraction:
            return True
        if self.within is not None:
            return False
        return self.closest is None or padding_fraction < self.closest.padding_fraction

    def _fit_states(self, shape: _ParentShape, scale: int, padding_of_rows: float) -> _Candidate | None:
        """None when a group of state finds no room, or none that would be wanted."""
        planes = Planes.of([scale * size for size in shape.plane_bytes])
        states: dict[int, GroupPacking] = {}
        worst = padding_of_rows
        for index, group in self._states.items():
            fitted = self._fit_state(index, group, planes)
            if fitted is None:
                return None
            states[index] = fitted
            used_bytes = fitted.cache_blocks_per_lcm_block * group.block_bytes
            worst = max(worst, _padding_fraction(used_bytes, planes.num_bytes))
        return _Candidate(shape=shape, scale=scale, states=states, padding_fraction=worst)

    def _fit_state(self, index: int, group: StateFields, planes: Planes) -> GroupPacking | None:
        """As many blocks as fit; None when that is none, or so few that the parent would not be wanted."""
        if self._fixed is not None:
            return group.place(self._fixed[index], planes)
        for num_blocks in range(min(MAX_SOLVED_PACKING, group.most_blocks(planes)), 0, -1):
            if not self._is_wanted(_padding_fraction(num_blocks * group.block_bytes, planes.num_bytes)):
                return None
            fitted = group.place(num_blocks, planes)
            if fitted is not None:
                return fitted
        return None


def _padding_fraction(used_bytes: int, num_bytes: int) -> float:
    return 1.0 - used_bytes / num_bytes


def _common_planes(wanted: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The fewest planes from which each of the lists can be taken, largest first."""
    counts: Counter[int] = Counter()
    for sizes in wanted:
        counts |= Counter(sizes)
    return tuple(sorted(counts.elements(), reverse=True))


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
        plane_bytes.append(align_up(payload_bytes, unit_bytes))
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
