"""Forward plans written by hand: a stand-in for the scheduler that gives requests scattered blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cache_runtime.contract import CacheRuntimeContract
from cache_runtime.recipes.spec import CacheFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class HandPlan:
    """The attributes of a scheduler plan that the runtime reads."""

    num_rows: int
    request_ids: Sequence[str]
    begins: npt.NDArray[np.int32]
    input_lengths: npt.NDArray[np.int32]
    logits_wanted: npt.NDArray[np.bool_]
    token_ids: npt.NDArray[np.int32]
    block_tables: Sequence[npt.NDArray[np.int32]]
    checkpoint_tokens: npt.NDArray[np.int32]
    state_input_slots: Sequence[npt.NDArray[np.int32]]
    state_output_slots: Sequence[npt.NDArray[np.int32]]
    zero_blocks: Sequence[npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The next tokens of one request; `wants_logits` as on the last chunk of a prompt and on decode rows.

    After the first `checkpoint_length` of the tokens, which end a block of every state group, states are kept as well.
    """

    request_id: str
    tokens: Sequence[int]
    wants_logits: bool = True
    checkpoint_length: int = 0


@dataclass(slots=True, kw_only=True)
class _GroupLedger:
    """One group's free blocks and tables.

    With a window, slots that no later token sees become holes. Of a state only the slots that a row names have blocks.
    """

    block_granularity: int
    is_state: bool
    window_tokens: int | None
    free: list[int]
    tables: dict[str, list[int]] = field(default_factory=dict)

    def extend(self, request_id: str, begin: int, end: int, checkpoint: int) -> list[int]:
        """Blocks for the tokens up to `end`, of which those before `begin` are computed; the fresh ones."""
        table = self.tables.setdefault(request_id, [])
        if self.is_state:
            return self._extend_state(table, begin, end, checkpoint)
        fresh = [self.free.pop() for _ in range(-(-end // self.block_granularity) - len(table))]
        table.extend(fresh)
        if self.window_tokens is not None:
            for slot in range(max(0, begin - self.window_tokens + 1) // self.block_granularity):
                if table[slot]:
                    self.free.insert(0, table[slot])
                table[slot] = 0
        return fresh

    def _extend_state(self, table: list[int], begin: int, end: int, checkpoint: int) -> list[int]:
        table.extend([0] * (-(-end // self.block_granularity) - len(table)))
        kept = {self.slot(position) for position in (begin, checkpoint, end) if position}
        fresh = []
        for slot, block in enumerate(table):
            if slot in kept and not block:
                table[slot] = self.free.pop()
                fresh.append(table[slot])
            elif slot not in kept and block:
                self.free.insert(0, block)
                table[slot] = 0
        return fresh

    def slot(self, position: int) -> int:
        """The slot of the state after the first `position` tokens, -1 for that of none."""
        return (position - 1) // self.block_granularity

    def slots(self, positions: Sequence[int]) -> npt.NDArray[np.int32]:
        """One per row; empty for a group without states, as the scheduler has it."""
        return np.array([self.slot(position) for position in positions] if self.is_state else [], dtype=np.int32)

    def stacked(self, request_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        tables = [self.tables[request_id] for request_id in request_ids]
        stacked = np.full((len(tables), max(map(len, tables))), -1, dtype=np.int32)
        for index, table in enumerate(tables):
            stacked[index, : len(table)] = table
        return stacked


class BlockLedger:
    """Hands out shuffled block ids of every group, so that no test passes by blocks being adjacent.

    Groups take turns with the parents, because blocks of two groups in one parent are the same bytes.
    """

    def __init__(self, contract: CacheRuntimeContract) -> None:
        self._groups = [
            _GroupLedger(
                block_granularity=group.block_granularity,
                is_state=group.spec.family is CacheFamily.STATE,
                window_tokens=group.spec.sliding_window_tokens,
                free=_shuffled_blocks(contract, index),
            )
            for index, group in enumerate(contract.groups)
        ]
        self._num_done: dict[str, int] = {}

    def plan(self, rows: Sequence[Row]) -> HandPlan:
        """Each row continues where its request stands; the ledger moves on."""
        begins = [self._num_done.get(row.request_id, 0) for row in rows]
        fresh: list[list[int]] = [[] for _ in self._groups]
        ends = [begin + len(row.tokens) for row, begin in zip(rows, begins, strict=True)]
        checkpoints = [
            begin + row.checkpoint_length if row.checkpoint_length else 0
            for row, begin in zip(rows, begins, strict=True)
        ]
        for row, begin, end, checkpoint in zip(rows, begins, ends, checkpoints, strict=True):
            for group, blocks in zip(self._groups, fresh, strict=True):
                blocks += group.extend(row.request_id, begin, end, checkpoint)
            self._num_done[row.request_id] = end
        request_ids = [row.request_id for row in rows]
        return HandPlan(
            num_rows=len(rows),
            request_ids=request_ids,
            begins=np.array(begins, dtype=np.int32),
            input_lengths=np.array([len(row.tokens) for row in rows], dtype=np.int32),
            logits_wanted=np.array([row.wants_logits for row in rows]),
            token_ids=np.concatenate([np.array(row.tokens, dtype=np.int32) for row in rows]),
            block_tables=[group.stacked(request_ids) for group in self._groups],
            checkpoint_tokens=np.array(checkpoints, dtype=np.int32),
            state_input_slots=[group.slots(begins) for group in self._groups],
            state_output_slots=[group.slots(ends) for group in self._groups],
            zero_blocks=[np.array(blocks, dtype=np.int32) for blocks in fresh],
        )


def _shuffled_blocks(contract: CacheRuntimeContract, group: int) -> list[int]:
    packing = contract.groups[group].virtual_packing
    parents = range(group, contract.num_lcm_blocks, len(contract.groups))
    blocks = [1 + parent * packing + slot for parent in parents for slot in range(packing)]
    random.Random(3 + group).shuffle(blocks)
    return blocks
