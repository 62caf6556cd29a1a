"""How every benchmark reports: a table for people on stderr, one JSON object per row on stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value. `goal` is None where none is set."""

    bench: str
    case: str
    value: float
    unit: str
    goal: float | None
    better: Literal["lower", "higher"]

    @property
    def is_met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.better == "lower" else self.value >= self.goal


class Report:
    """The rows of one benchmark, in the order in which they were measured."""

    def __init__(self, bench: str) -> None:
        self._bench = bench
        self._rows: list[Row] = []

    def lower(self, case: str, value: float, unit: str, goal: float | None = None) -> None:
        """Adds a value of which less is better."""
        self._rows.append(Row(bench=self._bench, case=case, value=value, unit=unit, goal=goal, better="lower"))

    def higher(self, case: str, value: float, unit: str, goal: float | None = None) -> None:
        """Adds a value of which more is better."""
        self._rows.append(Row(bench=self._bench, case=case, value=value, unit=unit, goal=goal, better="higher"))

    def print(self) -> None:
        print_rows(self._rows)


def print_rows(rows: Sequence[Row]) -> None:
    """The table of `rows`, all of one benchmark, then their JSON lines."""
    table = Table("case", "value", "unit", "goal", "met", title=rows[0].bench)
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    for row in rows:
        bound = "" if row.goal is None else f"{'<=' if row.better == 'lower' else '>='} {row.goal:g}"
        table.add_row(row.case, f"{row.value:,.4g}", row.unit, bound, marks[row.is_met])
    Console(stderr=True, width=120).print(table)
    for row in rows:
        print(json.dumps(asdict(row)), flush=True)
