"""Forward plans written by hand: a stand-in for the scheduler that gives requests scattered blocks of one group."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


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
    zero_blocks: Sequence[npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The next tokens of one request; `wants_logits` as on the last chunk of a prompt and on decode rows."""

    request_id: str
    tokens: Sequence[int]
    wants_logits: bool = True


@dataclass(slots=True)
class BlockLedger:
    """Hands out shuffled block ids, so that no test passes by blocks being adjacent."""

    num_blocks: int
    block_granularity: int
    free: list[int] = field(default_factory=list)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    num_done: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))
        random.Random(3).shuffle(self.free)

    def plan(self, rows: Sequence[Row]) -> HandPlan:
        """Each row continues where its request stands; the ledger moves on."""
        fresh: list[int] = []
        begins = [self.num_done.get(row.request_id, 0) for row in rows]
        for row, begin in zip(rows, begins, strict=True):
            table = self.blocks.setdefault(row.request_id, [])
            while len(table) * self.block_granularity < begin + len(row.tokens):
                table.append(self.free.pop())
                fresh.append(table[-1])
            self.num_done[row.request_id] = begin + len(row.tokens)
        return HandPlan(
            num_rows=len(rows),
            request_ids=[row.request_id for row in rows],
            begins=np.array(begins, dtype=np.int32),
            input_lengths=np.array([len(row.tokens) for row in rows], dtype=np.int32),
            logits_wanted=np.array([row.wants_logits for row in rows]),
            token_ids=np.concatenate([np.array(row.tokens, dtype=np.int32) for row in rows]),
            block_tables=[self._table(rows)],
            zero_blocks=[np.array(fresh, dtype=np.int32)],
        )

    def _table(self, rows: Sequence[Row]) -> npt.NDArray[np.int32]:
        widest = max(len(self.blocks[row.request_id]) for row in rows)
        table = np.full((len(rows), widest), -1, dtype=np.int32)
        for index, row in enumerate(rows):
            blocks = self.blocks[row.request_id]
            table[index, : len(blocks)] = blocks
        return table
