"""The table of scenarios in docs/design/handoff.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "design" / "handoff.md"
# Those of the collection, which has gaps.
NUMBERS = {
    "H": (1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 14, 15, 17, 18, 20, 22, 24),
    "LK": (1, 2, 3, 4, 6, 7, 8, 9),
    "W": (1, 2, 5, 6, 7, 9, 10, 11, 12, 14, 16, 17),
    "MT": (2, 4, 5, 6, 7, 9, 10),
    "O": (1, 2, 5, 7, 8, 9, 10),
}
_FILE = re.compile(r"`([\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)")


def names_in(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)}


def table_rows() -> list[str]:
    rows = TABLE.read_text(encoding="utf-8").partition("## Scenarios")[2].splitlines()
    return [row for row in rows if row.startswith("| ") and not row.startswith("| id ")]


def test_every_scenario_of_the_collection_has_a_row() -> None:
    listed = {name for row in table_rows() for name in row.split("|")[1].replace(",", " ").split()}
    assert listed == {f"{kind}{number}" for kind, numbers in NUMBERS.items() for number in numbers}


def test_every_scenario_names_tests_that_exist() -> None:
    for row in table_rows():
        named = _FILE.findall(row)
        assert named, row
        for file, names in named:
            path = ROOT / "tests" / file
            assert path.is_file(), f"{file} in: {row}"
            missing = set(re.findall(r"test_\w+", names)) - names_in(path)
            assert not missing, f"{sorted(missing)} of {file} in: {row}"
