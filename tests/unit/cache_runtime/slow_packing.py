"""What `solve_packing` promises, by trying everything: each number of planes, each multiple, each count of a state.

Obvious and slow. Fixed packings and groups of state among themselves are not its business.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cache_runtime.recipes.packing import ParentPacking
from cache_runtime.recipes.plane_slots import GroupPacking, PlaneSlot
from cache_runtime.recipes.spec import DTYPE_BYTES, CacheFamily, CacheFieldSpec, GroupDeclaration


def best_parent(
    declarations: Sequence[GroupDeclaration], max_padding_fraction: float, most_blocks: int
) -> ParentPacking | None:
    """The smallest parent within the bound, of these the one with most planes; without one the one that wastes least.

    `most_blocks`: of any group in a parent.
    """
    parents = [(worst_padding(parent, declarations), parent) for parent in all_parents(declarations, most_blocks)]
    within = [parent for padding, parent in parents if padding <= max_padding_fraction]
    if within:
        return min(within, key=lambda parent: (sum(parent.plane_bytes), -len(parent.plane_bytes)))
    return min(parents, key=lambda item: item[0])[1] if parents else None


def worst_padding(parent: ParentPacking, declarations: Sequence[GroupDeclaration]) -> float:
    return max(
        1.0 - group.cache_blocks_per_lcm_block * sum(field.block_bytes for field in fields) / sum(parent.plane_bytes)
        for group, (_, fields) in zip(parent.groups, declarations, strict=True)
    )


def all_parents(declarations: Sequence[GroupDeclaration], most_blocks: int) -> Iterator[ParentPacking]:
    """Those with more planes first, then the smaller ones."""
    rows = {index: fields for index, (spec, fields) in enumerate(declarations) if spec.family is CacheFamily.HISTORY}
    for num_planes in range(max(map(len, rows.values())), 0, -1):
        shares = {index: shared_planes(fields, num_planes) for index, fields in rows.items()}
        # What a block takes of a plane of the size that makes up most of the block.
        taken_bytes = {index: shares[index].interleave * dominant_bytes(fields) for index, fields in rows.items()}
        unit_bytes = math.lcm(*taken_bytes.values())
        for scale in range(1, most_blocks + 1):
            num_blocks = {index: scale * unit_bytes // num_bytes for index, num_bytes in taken_bytes.items()}
            if max(num_blocks.values()) <= most_blocks:
                parent = make_parent(declarations, shares, num_blocks, most_blocks)
                if parent is not None:
                    yield parent


@dataclass(frozen=True)
class SharedPlanes:
    """Which fields of a group of rows lie side by side."""

    interleave: int
    planes: list[list[int]]


def shared_planes(fields: Sequence[CacheFieldSpec], num_planes: int) -> SharedPlanes:
    """No more planes than that, and else as many as can be; a plane has fields of one size."""
    indices_of_size: dict[int, list[int]] = {}
    for index, field in enumerate(fields):
        indices_of_size.setdefault(field.block_bytes, []).append(index)
    for interleave in range(1, len(fields) + 1):
        planes = [
            indices[begin : begin + interleave]
            for indices in indices_of_size.values()
            for begin in range(0, len(indices), interleave)
        ]
        if len(planes) <= num_planes or len(planes) == len(indices_of_size):
            return SharedPlanes(interleave, planes)
    raise AssertionError("one plane per size is always found")


def dominant_bytes(fields: Sequence[CacheFieldSpec]) -> int:
    numbers = Counter(field.block_bytes for field in fields)
    return max(numbers, key=lambda size: (numbers[size] * size, size))


def make_parent(
    declarations: Sequence[GroupDeclaration],
    shares: Mapping[int, SharedPlanes],
    num_blocks: Mapping[int, int],
    most_blocks: int,
) -> ParentPacking | None:
    """None when a group of state finds no room."""
    sizes_of_group: dict[int, list[int]] = {}
    for index, share in shares.items():
        stride_bytes = [share.interleave * declarations[index][1][plane[0]].block_bytes for plane in share.planes]
        sizes_of_group[index] = [num_blocks[index] * num_bytes for num_bytes in stride_bytes]
    all_sizes = sorted({size for sizes in sizes_of_group.values() for size in sizes}, reverse=True)
    planes = [size for size in all_sizes for _ in range(max(sizes.count(size) for sizes in sizes_of_group.values()))]
    groups: list[GroupPacking] = []
    for index, (_, fields) in enumerate(declarations):
        if index in shares:
            groups.append(place_rows(fields, shares[index], num_blocks[index], sizes_of_group[index], planes))
            continue
        places = (place_state(fields, count, planes) for count in range(most_blocks, 0, -1))
        fitted = next((packing for packing in places if packing is not None), None)
        if fitted is None:
            return None
        groups.append(fitted)
    return ParentPacking(plane_bytes=tuple(planes), groups=tuple(groups))


def place_rows(
    fields: Sequence[CacheFieldSpec], share: SharedPlanes, count: int, sizes: Sequence[int], planes: Sequence[int]
) -> GroupPacking:
    """Each shared plane takes the first plane of its size that is left."""
    left = list(enumerate(planes))
    slots: dict[int, PlaneSlot] = {}
    for members, size in zip(share.planes, sizes, strict=True):
        place = next(item for item in left if item[1] == size)
        left.remove(place)
        for position, index in enumerate(members):
            slots[index] = PlaneSlot(plane=place[0], offset_bytes=position * fields[index].block_bytes)
    return GroupPacking(cache_blocks_per_lcm_block=count, slots=tuple(slots[index] for index in range(len(fields))))


def place_state(fields: Sequence[CacheFieldSpec], count: int, planes: Sequence[int]) -> GroupPacking | None:
    """Largest first, each in the first plane that divides into `count` strides of whole elements and has room."""
    element_bytes = math.lcm(*(DTYPE_BYTES[field.dtype] for field in fields))
    used = [0] * len(planes)
    slots: dict[int, PlaneSlot] = {}
    for index, field in sorted(enumerate(fields), key=lambda item: -item[1].block_bytes):
        aligned = [-(-num_bytes // DTYPE_BYTES[field.dtype]) * DTYPE_BYTES[field.dtype] for num_bytes in used]
        fitting = [
            plane
            for plane, size in enumerate(planes)
            if size % (count * element_bytes) == 0 and aligned[plane] + field.block_bytes <= size // count
        ]
        if not fitting:
            return None
        slots[index] = PlaneSlot(plane=fitting[0], offset_bytes=aligned[fitting[0]])
        used[fitting[0]] = aligned[fitting[0]] + field.block_bytes
    return GroupPacking(cache_blocks_per_lcm_block=count, slots=tuple(slots[index] for index in range(len(fields))))
