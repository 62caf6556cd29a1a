"""The runs of one write as rows of an array: what the planner makes and the engines post, without an object per run.

A long prompt makes tens of thousands of runs, and making, checking and packing one object for each takes longer than
some planes need to move the bytes. Whoever wants to look at single runs may: a table is a sequence of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from ._native import pack_runs
from .engine import Run


class RunTable(Sequence[Run]):
    """An immutable sequence of runs. `rows`: int64[num_runs, 3], source address, target address and length in bytes.

    Values are checked where they enter an engine, by `regions.table_rejection`.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        """Takes the array over. Raises `ValueError` for another shape."""
        if rows.ndim != 2 or rows.shape[1] != 3:
            raise ValueError(f"rows: shape {rows.shape} given, (num_runs, 3) required")
        self._rows = np.ascontiguousarray(rows, dtype=np.int64)
        self._rows.flags.writeable = False

    @classmethod
    def of(cls, runs: Sequence[Run]) -> RunTable:
        """The same runs; a table as it is. Raises `OverflowError` for a number outside of int64."""
        return runs if isinstance(runs, RunTable) else cls(pack_runs(runs))

    @classmethod
    def joined(cls, tables: Sequence[RunTable]) -> RunTable:
        """One table after the other."""
        if len(tables) == 1:
            return tables[0]
        return cls(np.concatenate([table.rows for table in tables])) if tables else cls.of(())

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        return self._rows

    @property
    def num_bytes(self) -> int:
        return int(self._rows[:, 2].sum())

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Run]:
        return map(Run._make, self._rows.tolist())

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> RunTable: ...
    def __getitem__(self, index: int | slice) -> Run | RunTable:
        if isinstance(index, slice):
            return RunTable(self._rows[index])
        return Run._make(self._rows[index].tolist())

    def __eq__(self, other: object) -> bool:
        return np.array_equal(self._rows, other.rows) if isinstance(other, RunTable) else NotImplemented

    def __repr__(self) -> str:
        return f"RunTable({len(self)} runs, {self.num_bytes} bytes)"
