"""The table of scenarios in docs/design/handoff.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "design" / "handoff.md"
_FILE = re.compile(r"`([\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)")


def names_in(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)}


def test_every_scenario_names_tests_that_exist() -> None:
    rows = TABLE.read_text(encoding="utf-8").partition("## Scenarios")[2].splitlines()
    rows = [row for row in rows if row.startswith("| ") and not row.startswith("| id ")]
    assert len(rows) > 30
    for row in rows:
        named = _FILE.findall(row)
        assert named, row
        for file, names in named:
            path = ROOT / "tests" / file
            assert path.is_file(), f"{file} in: {row}"
            missing = set(re.findall(r"test_\w+", names)) - names_in(path)
            assert not missing, f"{sorted(missing)} of {file} in: {row}"
