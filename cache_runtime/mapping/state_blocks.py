"""StateBlocks: which snapshot each row of a forward continues from and which it leaves behind. Fail-closed.

State groups have no rows and no pages: a slot of the block table is a whole state, and the plan names the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cache_runtime.contract import CacheGroupContract
from cache_runtime.errors import BatchContractError
from cache_runtime.mapping.batch_metadata import HOLE_BLOCK_ID, CacheBatchMetadata, Int32Array

NO_BLOCK = -1
"""A row that starts from zeros, or leaves no snapshot on its way."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateBlockIds:
    """Physical block ids of one state group, all int32[num_rows].

    Row r continues from `input_blocks[r]` (NO_BLOCK: from zeros), leaves the state after `checkpoint_lengths[r]` of its
    tokens in `checkpoint_blocks[r]` (NO_BLOCK, and 0 tokens: nowhere) and the one after all of them in
    `output_blocks[r]`, which may be its input.
    """

    input_blocks: Int32Array
    output_blocks: Int32Array
    checkpoint_blocks: Int32Array
    checkpoint_lengths: Int32Array


def resolve_state_blocks(group: CacheGroupContract, metadata: CacheBatchMetadata) -> StateBlockIds:
    """Raises BatchContractError naming group, row and slot when a state has no block, or an input is missing."""
    begins, ends = metadata.begins, metadata.begins + metadata.input_lengths
    checkpoints = metadata.checkpoint_tokens
    _check_checkpoints(group, begins, ends, checkpoints)
    input_slots = metadata.state_input_slots[group.group_id]
    output_slots = metadata.state_output_slots[group.group_id]
    _check_inputs(group, begins, input_slots)
    _check_outputs(group, output_slots)
    has_checkpoint = checkpoints > 0
    checkpoint_slots = np.where(has_checkpoint, (checkpoints - 1) // group.block_granularity, NO_BLOCK)
    table = metadata.block_tables[group.group_id]
    return StateBlockIds(
        input_blocks=_blocks_of(group, table, input_slots, "continues from"),
        output_blocks=_blocks_of(group, table, output_slots, "ends in"),
        checkpoint_blocks=_blocks_of(group, table, checkpoint_slots.astype(np.int32), "leaves a checkpoint in"),
        checkpoint_lengths=np.where(has_checkpoint, checkpoints - begins, 0).astype(np.int32),
    )


def _check_checkpoints(
    group: CacheGroupContract, begins: Int32Array, ends: Int32Array, checkpoints: Int32Array
) -> None:
    outside = (checkpoints != 0) & ((checkpoints <= begins) | (checkpoints >= ends))
    if outside.any():
        row = int(outside.argmax())
        raise BatchContractError(
            f'group "{group.group_id}": row {row} has its checkpoint at {checkpoints[row]}, not inside '
            f"({begins[row]}, {ends[row]})"
        )


def _check_outputs(group: CacheGroupContract, output_slots: Int32Array) -> None:
    if output_slots.size and output_slots.min() < 0:
        raise BatchContractError(f'group "{group.group_id}": row {int(output_slots.argmin())} leaves its state nowhere')


def _check_inputs(group: CacheGroupContract, begins: Int32Array, input_slots: Int32Array) -> None:
    """A row in the middle of its request that starts from zeros would forget everything before it, silently."""
    odd = (begins > 0) != (input_slots >= 0)
    if odd.any():
        row = int(odd.argmax())
        raise BatchContractError(
            f'group "{group.group_id}": row {row} begins at {begins[row]} and continues from slot {input_slots[row]}'
        )


def _blocks_of(group: CacheGroupContract, table: Int32Array, slots: Int32Array, role: str) -> Int32Array:
    """The block of each row's slot, NO_BLOCK where the row has none (slot -1)."""
    num_slots = table.shape[1]
    wanted = slots >= 0
    in_table = wanted & (slots < num_slots)
    rows = np.arange(slots.size)
    blocks = table[rows, np.where(in_table, slots, 0)] if num_slots else np.zeros_like(slots)
    missing = wanted & (~in_table | (blocks <= HOLE_BLOCK_ID))
    if missing.any():
        row = int(missing.argmax())
        raise BatchContractError(f'group "{group.group_id}": row {row} {role} slot {slots[row]}, which has no block')
    return np.where(wanted, blocks, NO_BLOCK).astype(np.int32)
