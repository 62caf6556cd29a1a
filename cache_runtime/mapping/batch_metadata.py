"""CacheBatchMetadata: one forward's block tables and spans, checked against the runtime contract.

Block vocabulary only: kernel pages do not exist yet here. Holds read-only arrays; it neither copies nor changes what
the scheduler's plan exported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cache_runtime.contract import CacheGroupContract, CacheRuntimeContract
from cache_runtime.errors import BatchContractError
from cache_runtime.recipes.spec import CacheFamily

Int32Array = npt.NDArray[np.int32]

HOLE_BLOCK_ID = 0
"""Table entry of a slot without storage: the null block."""

PADDING_BLOCK_ID = -1
"""Table entry behind the end of a row's table."""


class BatchPlan(Protocol):
    """The part of a scheduler plan the mapping reads; `scheduler_core.Plan` is one."""

    @property
    def num_rows(self) -> int: ...
    @property
    def begins(self) -> Int32Array: ...
    @property
    def input_lengths(self) -> Int32Array: ...
    @property
    def block_tables(self) -> Sequence[Int32Array]: ...
    @property
    def checkpoint_tokens(self) -> Int32Array: ...
    @property
    def state_input_slots(self) -> Sequence[Int32Array]: ...
    @property
    def state_output_slots(self) -> Sequence[Int32Array]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheBatchMetadata:
    """Row r feeds the tokens at positions [begins[r], begins[r] + input_lengths[r]).

    `begins`, `input_lengths`: int32[num_rows]. `block_tables[group_id]`: int32[num_rows, slots of the group]; slot i
    covers positions [i * block_granularity, (i + 1) * block_granularity). `checkpoint_tokens`: int32[num_rows], the
    position inside a row up to which its states are kept as well, 0 for none. `state_input_slots[group_id]` and
    `state_output_slots[group_id]`, of state groups only: int32[num_rows], the slot a row continues from (-1: none) and
    the one it leaves its state in.
    """

    contract: CacheRuntimeContract
    num_rows: int
    begins: Int32Array
    input_lengths: Int32Array
    block_tables: Mapping[str, Int32Array]
    checkpoint_tokens: Int32Array
    state_input_slots: Mapping[str, Int32Array]
    state_output_slots: Mapping[str, Int32Array]

    @classmethod
    def from_plan(cls, plan: BatchPlan, contract: CacheRuntimeContract) -> CacheBatchMetadata:
        """Raises BatchContractError naming the group, row and both values when the plan breaks the contract."""
        tables = plan.block_tables
        if len(tables) != len(contract.groups):
            raise BatchContractError(
                f"plan carries {len(tables)} block tables, the contract has {len(contract.groups)} groups"
            )
        begins, input_lengths = plan.begins, plan.input_lengths
        _check_spans(plan.num_rows, begins, input_lengths)
        for group, table in zip(contract.groups, tables, strict=True):
            _check_table(group, table, plan.num_rows)
            if group.spec.family is CacheFamily.HISTORY:
                _check_written_slots(group, table, begins, input_lengths)
                if not group.spec.replayable:
                    _check_read_slots(group, table, begins, input_lengths)
        return cls(
            contract=contract,
            num_rows=plan.num_rows,
            begins=begins,
            input_lengths=input_lengths,
            block_tables=MappingProxyType(dict(zip(contract.group_ids, tables, strict=True))),
            checkpoint_tokens=_checked_column("checkpoint_tokens", plan.checkpoint_tokens, plan.num_rows),
            state_input_slots=_state_columns("state_input_slots", plan.state_input_slots, plan, contract),
            state_output_slots=_state_columns("state_output_slots", plan.state_output_slots, plan, contract),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.input_lengths.sum())


def _checked_column(name: str, values: Int32Array, num_rows: int) -> Int32Array:
    if values.shape != (num_rows,):
        raise BatchContractError(f"{name} has shape {values.shape}, expected ({num_rows},)")
    return values


def _state_columns(
    name: str, columns: Sequence[Int32Array], plan: BatchPlan, contract: CacheRuntimeContract
) -> Mapping[str, Int32Array]:
    if len(columns) != len(contract.groups):
        raise BatchContractError(f"plan carries {len(columns)} {name}, the contract has {len(contract.groups)} groups")
    return MappingProxyType(
        {
            group.group_id: _checked_column(f'group "{group.group_id}": {name}', column, plan.num_rows)
            for group, column in zip(contract.groups, columns, strict=True)
            if group.spec.family is CacheFamily.STATE
        }
    )


def _check_spans(num_rows: int, begins: Int32Array, input_lengths: Int32Array) -> None:
    for name, values in (("begins", begins), ("input_lengths", input_lengths)):
        _checked_column(name, values, num_rows)
        if num_rows and values.min() < 0:
            raise BatchContractError(f"{name} must not be negative, row {int(values.argmin())} has {values.min()}")


def _check_table(group: CacheGroupContract, table: Int32Array, num_rows: int) -> None:
    if table.ndim != 2 or table.shape[0] != num_rows:
        raise BatchContractError(
            f'group "{group.group_id}": block table has shape {table.shape}, expected {num_rows} rows'
        )
    if table.size == 0:
        return
    for block_id in (table.min(), table.max()):
        if not PADDING_BLOCK_ID <= block_id < group.num_virtual_blocks:
            raise BatchContractError(
                f'group "{group.group_id}": block id {block_id} is outside [{PADDING_BLOCK_ID}, '
                f"{group.num_virtual_blocks})"
            )


def _check_written_slots(
    group: CacheGroupContract, table: Int32Array, begins: Int32Array, input_lengths: Int32Array
) -> None:
    """Every token of the forward needs storage: writing its rows into the null block would lose them silently."""
    begin_slots = begins // group.block_granularity
    end_slots = np.where(input_lengths > 0, -(-(begins + input_lengths) // group.block_granularity), 0)
    num_slots = table.shape[1]
    slots = np.arange(num_slots, dtype=np.int32)
    written = (slots >= begin_slots[:, None]) & (slots < end_slots[:, None])
    missing = (written & (table <= HOLE_BLOCK_ID)).any(axis=1) | (end_slots > num_slots)
    if missing.any():
        row = int(missing.argmax())
        raise BatchContractError(
            f'group "{group.group_id}": row {row} writes positions [{begins[row]}, {begins[row] + input_lengths[row]}) '
            f"without a block for every slot of [{begin_slots[row]}, {end_slots[row]})"
        )


def _check_read_slots(
    group: CacheGroupContract, table: Int32Array, begins: Int32Array, input_lengths: Int32Array
) -> None:
    """Every retained token before the forward needs storage: a hole would be read as the rows of the null block.

    A replayable group is exempt, because after a hit its rows are visible from the replayed tokens on only.
    """
    window_tokens = group.spec.sliding_window_tokens
    oldest = np.zeros_like(begins) if window_tokens is None else np.maximum(begins - (window_tokens - 1), 0)
    begin_slots = oldest // group.block_granularity
    end_slots = np.where(input_lengths > 0, -(-begins // group.block_granularity), 0)
    slots = np.arange(table.shape[1], dtype=np.int32)
    missing = ((slots >= begin_slots[:, None]) & (slots < end_slots[:, None]) & (table <= HOLE_BLOCK_ID)).any(axis=1)
    if missing.any():
        row = int(missing.argmax())
        raise BatchContractError(
            f'group "{group.group_id}": row {row} reads positions [{oldest[row]}, {begins[row]}) without a block for '
            f"every slot of [{begin_slots[row]}, {end_slots[row]})"
        )
