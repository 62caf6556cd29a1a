"""Which bytes of a block one tensor rank writes to one tensor rank of a peer, whatever the sizes of the two sides.

Pure arithmetic over the logical field: it knows no arena, no address and no block id. Of everything that several ranks
of the source hold, one writes to a given rank of the target, so every byte of a target block has exactly one writer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cache_runtime.recipes.partition import HeadSection, TensorRank, count_shares
from cache_runtime.recipes.spec import DTYPE_BYTES

from .schema import FieldSchema, LogicalManifest

Strips: TypeAlias = npt.NDArray[np.int64]
"""int64[num_strips, 3]: (offset in the source's block, offset in the target's block, length), bytes, by target."""


def plan_strips(logical: LogicalManifest, source: TensorRank, target: TensorRank) -> Mapping[str, Strips]:
    """What `source` writes of a block of each field to `target`; no strips where another rank does.

    Both manifests must have been validated, so that the heads of every field share out on both sides.
    """
    return {item.field_id: field_strips(item, source, target) for item in logical.fields}


def field_strips(item: FieldSchema, source: TensorRank, target: TensorRank) -> Strips:
    """Strips of one block of one field, merged where they are neighbours on both sides."""
    if item.partition_axis is None:
        # Every source rank has all of it; which one writes is spread over the targets.
        block_bytes = item.rank_block_bytes(source.size)
        return _table([(0, 0, block_bytes)] if target.rank % source.size == source.rank else [])
    spans = _axis_spans(item.sections, source, target)
    num_outer = math.prod(item.block_shape[: item.partition_axis])
    inner_bytes = math.prod(item.block_shape[item.partition_axis + 1 :]) * DTYPE_BYTES[item.dtype]
    source_bytes, target_bytes = (
        sum(section.extent_on(rank) for section in item.sections) * inner_bytes for rank in (source, target)
    )
    outer = np.arange(num_outer, dtype=np.int64)[:, None, None] * np.array([source_bytes, target_bytes, 0])
    return merge_neighbours((outer + _table(spans) * inner_bytes).reshape(-1, 3))


def _axis_spans(
    sections: tuple[HeadSection, ...], source: TensorRank, target: TensorRank
) -> list[tuple[int, int, int]]:
    """(begin on the source's axis, begin on the target's, extent) in elements, for what `source` writes."""
    spans = []
    source_begin = target_begin = 0
    for section in sections:
        ours, theirs = source.heads(section.num_heads), target.heads(section.num_heads)
        first, end = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
        if first < end and _is_writer(section.num_heads, source, target):
            width = section.head_width
            spans.append(
                (
                    source_begin + (first - ours.start) * width,
                    target_begin + (first - theirs.start) * width,
                    (end - first) * width,
                )
            )
        source_begin += section.extent_on(source)
        target_begin += section.extent_on(target)
    return spans


def _is_writer(num_heads: int, source: TensorRank, target: TensorRank) -> bool:
    """Whether `source` is the one that writes its heads to `target`, of the neighbours that hold the same."""
    num_shares = count_shares(num_heads, source.size)
    num_holders = source.size if num_shares is None else source.size // num_shares
    return source.rank % num_holders == target.rank % num_holders


def _table(rows: list[tuple[int, int, int]]) -> Strips:
    return np.array(rows, dtype=np.int64).reshape(len(rows), 3)


def merge_neighbours(table: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Rows (source, target, length), ascending on the target's side: those that touch on both sides as one row."""
    if len(table) < 2:
        return table
    sources, targets, lengths = table.T
    is_start = np.ones(len(table), dtype=np.bool_)
    is_start[1:] = sources[1:] != sources[:-1] + lengths[:-1]
    is_start[1:] |= targets[1:] != targets[:-1] + lengths[:-1]
    if bool(is_start.all()):
        # As of strips of blocks, of which there are many.
        return table
    merged = table[is_start]
    merged[:, 2] = np.add.reduceat(table[:, 2], np.flatnonzero(is_start))
    return merged
