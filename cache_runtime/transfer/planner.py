"""Turns "these blocks of these fields" into the runs a data plane posts: pure arithmetic over two rank placements.

It does not know requests, tokens or engines. Both placements must have been validated by their manifests and found
bridgeable (`placement.check_bridgeable`) before the first plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .engine import MAX_RUN_BYTES, Run
from .partition import Strips, merge_neighbours
from .runs import RunTable
from .schema import FieldPlacement, RankPlacement

Int64Array = npt.NDArray[np.int64]
BlockIds = Sequence[int] | npt.NDArray[np.integer]
FieldPair = tuple[FieldPlacement, FieldPlacement]

__all__ = ["MAX_RUN_BYTES", "BlockIds", "PlanError", "Run", "coalesce", "plan_block_runs"]


class PlanError(ValueError):
    """The asked-for copy names a field or block that one of the placements does not have."""


def plan_block_runs(
    source: RankPlacement,
    target: RankPlacement,
    field_ids: Sequence[str],
    source_blocks: BlockIds,
    target_blocks: BlockIds,
    *,
    group_id: str | None = None,
    strips: Mapping[str, Strips] | None = None,
    max_run_bytes: int = MAX_RUN_BYTES,
) -> RunTable:
    """Runs that copy `source_blocks[i]` to `target_blocks[i]` of every field, coalesced and split.

    Args:
        source: Placement of the rank that writes. Addresses of the runs' sources.
        target: Placement of the peer's rank. Addresses of the runs' targets.
        field_ids: Fields to copy; all of them belong to `group_id`.
        source_blocks: Block ids int[num_blocks] in the source's numbering, each in [1, num_blocks of the group).
        target_blocks: Block ids of the same length in the target's numbering; no id twice.
        group_id: Group whose block counts bound the ids; may be left out when the placements have one group only.
        strips: What of a block of each field is copied (`partition.plan_strips`); None: whole blocks, which is what
            ranks of nodes with equally many ranks exchange.
        max_run_bytes: Longest run that is made.

    Raises:
        PlanError: unknown or repeated field, unknown group, id out of range, repeated target, lists of two lengths,
            a field whose block has another size on the other side, or a strip that is not inside both blocks.
    """
    group_id = _resolve_group(source, target, group_id)
    sources, targets = _checked_blocks(source, target, group_id, source_blocks, target_blocks)
    pairs = _paired_fields(source, target, field_ids)
    if not len(sources):
        return RunTable.of(())
    whole = [pair for pair in pairs if strips is None or _is_whole(pair, strips[pair[0].field_id])]
    cut = [] if strips is None else [(pair, strips[pair[0].field_id]) for pair in pairs if pair not in whole]
    tables = [_strip_runs(source, target, pair, rows, sources, targets) for pair, rows in cut]
    if whole:
        tables.insert(0, _whole_runs(source, target, whole, sources, targets))
    return RunTable(_split(_joined(tables), max_run_bytes))


def coalesce(runs: Sequence[Run], max_run_bytes: int = MAX_RUN_BYTES) -> RunTable:
    """The same bytes in as few runs as possible: merges runs adjacent on both sides, then splits above the maximum.

    The result is ordered by target address. `runs` must not write a byte twice.
    """
    table = RunTable.of(runs).rows
    if (table[1:, 1] < table[:-1, 1]).any():
        table = table[np.argsort(table[:, 1], kind="stable")]
    return RunTable(_split(merge_neighbours(table), max_run_bytes))


def _resolve_group(source: RankPlacement, target: RankPlacement, group_id: str | None) -> str:
    if group_id is None:
        if len(source.block_counts) != 1:
            names = ", ".join(count.group_id for count in source.block_counts)
            raise PlanError(f"group_id is needed: the source placement has the groups {names}")
        group_id = source.block_counts[0].group_id
    for side, placement in (("source", source), ("target", target)):
        if placement.find_num_blocks(group_id) is None:
            raise PlanError(f'group_id "{group_id}" is unknown to the {side} placement')
    return group_id


def _checked_blocks(
    source: RankPlacement, target: RankPlacement, group_id: str, source_blocks: BlockIds, target_blocks: BlockIds
) -> tuple[Int64Array, Int64Array]:
    """Both id lists as int64[num_blocks], bounds-checked."""
    if len(source_blocks) != len(target_blocks):
        raise PlanError(f"{len(source_blocks)} source_blocks for {len(target_blocks)} target_blocks")
    sources = _in_bounds("source_blocks", source_blocks, source, group_id)
    targets = _in_bounds("target_blocks", target_blocks, target, group_id)
    if len(np.unique(targets)) != len(targets):
        raise PlanError("target_blocks names a block twice")
    return sources, targets


def _in_bounds(name: str, blocks: BlockIds, placement: RankPlacement, group_id: str) -> Int64Array:
    try:
        ids = np.asarray(blocks, dtype=np.int64)
    except OverflowError:
        raise PlanError(f"{name} holds an id above 2**63") from None
    num_blocks = placement.find_num_blocks(group_id) or 0
    outside = ids[(ids < 1) | (ids >= num_blocks)]
    if len(outside):
        raise PlanError(f'{name} holds {int(outside[0])}, outside [1, {num_blocks}) of group "{group_id}"')
    return ids


def _paired_fields(source: RankPlacement, target: RankPlacement, field_ids: Sequence[str]) -> list[FieldPair]:
    if len(set(field_ids)) != len(field_ids):
        raise PlanError("field_ids names a field twice")
    pairs = []
    for field_id in field_ids:
        ours, theirs = source.find_field(field_id), target.find_field(field_id)
        if ours is None or theirs is None:
            side = "source" if ours is None else "target"
            raise PlanError(f'field "{field_id}" is unknown to the {side} placement')
        pairs.append((ours, theirs))
    return pairs


def _is_whole(pair: FieldPair, strips: Strips) -> bool:
    """Whether the strips are one block of either side, so that the pair needs no cutting."""
    return len(strips) == 1 and all(int(strips[0, 2]) == field.block_bytes for field in pair)


def _whole_runs(
    source: RankPlacement, target: RankPlacement, pairs: Sequence[FieldPair], sources: Int64Array, targets: Int64Array
) -> Int64Array:
    for ours, theirs in pairs:
        if ours.block_bytes != theirs.block_bytes:
            raise PlanError(
                f'field "{ours.field_id}": block_bytes source={ours.block_bytes}, target={theirs.block_bytes}'
            )
    dense: list[FieldPair] = []
    spread: list[FieldPair] = []
    for pair in pairs:
        (dense if _is_dense(pair) else spread).append(pair)
    tables = []
    if dense:
        tables.append(_field_runs(source, target, dense, _adjacent_blocks(sources, targets)))
    if spread:
        tables.append(_field_runs(source, target, spread, (sources, targets, np.ones_like(sources))))
    return _joined(tables)


def _joined(tables: Sequence[Int64Array]) -> Int64Array:
    """Mostly of one: prompts in small chunks are many small plans."""
    if len(tables) == 1:
        return tables[0]
    return np.concatenate(tables) if tables else np.empty((0, 3), dtype=np.int64)


def _strip_runs(
    source: RankPlacement,
    target: RankPlacement,
    pair: FieldPair,
    strips: Strips,
    sources: Int64Array,
    targets: Int64Array,
) -> Int64Array:
    """int64[num_blocks * num_strips, 3], block by block."""
    for side, (field, column) in enumerate(zip(pair, strips.T, strict=False)):
        ends = column + strips[:, 2]
        if len(strips) and (int(column.min()) < 0 or int(ends.max()) > field.block_bytes):
            raise PlanError(
                f'field "{field.field_id}": a strip ends at byte {int(ends.max())} of the {("source", "target")[side]} '
                f"block, block_bytes={field.block_bytes}"
            )
    ours, theirs = pair
    table = np.repeat(strips[None], len(sources), axis=0)
    table[:, :, 0] += (source.arena_base + ours.offset_bytes + sources * ours.block_stride_bytes)[:, None]
    table[:, :, 1] += (target.arena_base + theirs.offset_bytes + targets * theirs.block_stride_bytes)[:, None]
    return table.reshape(-1, 3)


def _is_dense(pair: FieldPair) -> bool:
    """Whether neighbouring blocks touch on both sides, so that neighbours form one run."""
    return all(field.block_stride_bytes == field.block_bytes for field in pair)


def _adjacent_blocks(sources: Int64Array, targets: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Maximal stretches of ids that ascend by one on both sides: (first source, first target, number of blocks)."""
    order = np.argsort(targets, kind="stable")
    sources, targets = sources[order], targets[order]
    starts = np.concatenate(([True], (np.diff(sources) != 1) | (np.diff(targets) != 1)))
    begins = np.flatnonzero(starts)
    return sources[begins], targets[begins], np.diff(np.append(begins, len(sources)))


def _field_runs(
    source: RankPlacement,
    target: RankPlacement,
    pairs: Sequence[FieldPair],
    stretches: tuple[Int64Array, Int64Array, Int64Array],
) -> Int64Array:
    """int64[num_pairs * num_stretches, 3] of (source address, target address, bytes), one field after the other."""
    first_sources, first_targets, run_blocks = stretches
    # int64[num_pairs, 5], explicit shape so that no pairs is no rows.
    geometry = np.array(
        [
            (
                ours.offset_bytes,
                ours.block_stride_bytes,
                theirs.offset_bytes,
                theirs.block_stride_bytes,
                ours.block_bytes,
            )
            for ours, theirs in pairs
        ],
        dtype=np.int64,
    ).reshape(len(pairs), 5, 1)
    table = np.empty((len(pairs), len(first_sources), 3), dtype=np.int64)
    table[:, :, 0] = source.arena_base + geometry[:, 0] + first_sources * geometry[:, 1]
    table[:, :, 1] = target.arena_base + geometry[:, 2] + first_targets * geometry[:, 3]
    table[:, :, 2] = run_blocks * geometry[:, 4]
    return table.reshape(-1, 3)


def _split(table: Int64Array, max_run_bytes: int) -> Int64Array:
    """Cuts rows longer than `max_run_bytes` into runs of that size and a rest."""
    if max_run_bytes <= 0:
        raise PlanError(f"max_run_bytes={max_run_bytes} must be positive")
    lengths = table[:, 2]
    if not len(table) or int(lengths.max()) <= max_run_bytes:
        return table
    num_parts = -(-lengths // max_run_bytes)
    parts = np.repeat(table, num_parts, axis=0)
    part_index = np.arange(len(parts)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    done_bytes = part_index * max_run_bytes
    parts[:, 0] += done_bytes
    parts[:, 1] += done_bytes
    parts[:, 2] = np.minimum(parts[:, 2] - done_bytes, max_run_bytes)
    return parts
