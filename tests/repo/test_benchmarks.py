"""What programs read of benchmarks: one JSON object a line, of one shape, from a target of `make` for each."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted((ROOT / "bench").glob("bench_*.py"))
KEYS = ["bench", "case", "value", "unit", "goal", "better"]
_REPORT = """
from rows import Report
report = Report("sample")
report.lower("time", 1.5, "ms", 2.0)
report.higher("rate", 7, "1/s")
report.print()
"""


def test_a_report_is_a_table_for_people_and_a_json_object_a_line_for_programs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _REPORT], cwd=ROOT / "bench", capture_output=True, text=True, timeout=60, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(row) for row in rows] == [KEYS, KEYS]
    assert [list(row.values()) for row in rows] == [
        ["sample", "time", 1.5, "ms", 2.0, "lower"],
        ["sample", "rate", 7, "1/s", None, "higher"],
    ]
    assert all(word in done.stderr for word in ("sample", "time", "<= 2", "yes"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_benchmark_has_a_target_and_prints_nothing_but_its_report(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    target = path.stem.replace("_", "-")
    assert re.search(rf"^{target}: setup ## .+\n\t@\$\(BIN\)/python bench/{path.name}\b", makefile, re.MULTILINE)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert any(isinstance(node, ast.ImportFrom) and node.module == "rows" for node in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            # To people, or to the benchmark itself: to a process that it started, or from one over a pipe of its own.
            assert "file" in {word.arg for word in node.keywords} or _is_in_a_child(tree, node), ast.unparse(node)


def _is_in_a_child(tree: ast.Module, call: ast.Call) -> bool:
    """Whether the call is in a function that only another process of the benchmark runs."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return any(function.name == "receive" for function in functions if call in list(ast.walk(function)))


def test_there_are_the_benchmarks_that_goals_are_set_for() -> None:
    assert {path.stem for path in BENCHMARKS} >= {
        f"bench_{name}" for name in ("handoff", "mesh", "model", "placement", "scheduler", "trace")
    }
