"""Holds the index of scheduler behaviours to the tests: every line has a test, every tag a line.

Tags are read from the sources, so that a test that is skipped or deselected still counts where it stands.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "design" / "scheduler_behaviours.md"
BENCH = ROOT / "bench" / "bench_scheduler.py"

NUM_BEHAVIOURS = dict(
    zip("ABCDEFGHIJKLMNOPQRST", (11, 5, 11, 9, 11, 5, 17, 19, 9, 16, 16, 16, 19, 12, 11, 5, 8, 7, 5, 8), strict=True)
)
LINE = re.compile(
    r"- (?P<id>[A-T]\d+) (?P<title>.+?)(?:; differs: (?P<differs>.+?))?(?:; shown by bench: (?P<bench>.+))?"
)
CPP_TAG = re.compile(r"// behaviour: (.+)")
CPP_TEST = re.compile(r"TEST(?:_F)?\(")
MAX_TITLE_WORDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    behaviour: str
    title: str
    bench: str | None


def entries_of(text: str) -> list[Entry]:
    """The lines of the index; raises on a list item that is none."""
    entries = []
    for item in re.findall(r"^- .*$", text, re.MULTILINE):
        line = LINE.fullmatch(item)
        assert line is not None, f"not a behaviour: {item}"
        entries.append(Entry(behaviour=line["id"], title=line["title"], bench=line["bench"]))
    return entries


def python_tags(source: str) -> Iterator[str]:
    """Ids in `@pytest.mark.behaviour(...)` over test functions."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.behaviour":
                yield from (ast.literal_eval(argument) for argument in decorator.args)


def cpp_tags(source: str) -> Iterator[str]:
    """Ids in `// behaviour: A1, B2` directly over a test; raises when something else follows."""
    lines = source.splitlines()
    for tag, following in zip(lines, [*lines[1:], ""], strict=True):
        if (found := CPP_TAG.fullmatch(tag)) is not None:
            assert CPP_TEST.match(following), f"a tag over something that is no test: {tag}"
            yield from re.split(r",? ", found[1])


def shown_by_tests() -> Counter[str]:
    tags: Counter[str] = Counter()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tags.update(python_tags(path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "scheduler_core" / "tests").glob("*_test.cpp")):
        tags.update(cpp_tags(path.read_text(encoding="utf-8")))
    return tags


def bench_rows() -> set[str]:
    """The constant names of rows that the benchmark prints."""
    return {
        keyword.value.value
        for node in ast.walk(ast.parse(BENCH.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "case" and isinstance(keyword.value, ast.Constant)
    }


ENTRIES = entries_of(INDEX.read_text(encoding="utf-8"))


def test_the_index_is_complete_and_in_order() -> None:
    expected = [f"{letter}{number}" for letter, count in NUM_BEHAVIOURS.items() for number in range(1, count + 1)]
    assert len(expected) == 220
    assert [entry.behaviour for entry in ENTRIES] == expected


def test_titles_are_short_and_tell_the_behaviours_apart() -> None:
    assert len({entry.title for entry in ENTRIES}) == len(ENTRIES)
    assert [entry.behaviour for entry in ENTRIES if len(entry.title.split()) > MAX_TITLE_WORDS] == []


def test_every_behaviour_is_shown() -> None:
    tags = shown_by_tests()
    missing = [f"{e.behaviour} {e.title}" for e in ENTRIES if e.behaviour not in tags and e.bench is None]
    assert not missing, "no test is tagged with:\n" + "\n".join(missing)


def test_every_tag_is_a_behaviour() -> None:
    unknown = shown_by_tests().keys() - {entry.behaviour for entry in ENTRIES}
    assert not unknown, f"tags that the index does not have: {sorted(unknown)}"


def test_every_row_that_is_named_is_one_of_the_benchmark() -> None:
    named = {entry.bench for entry in ENTRIES if entry.bench is not None}
    assert named
    assert named <= bench_rows(), f"no such row: {sorted(named - bench_rows())}"


def test_tags_are_read_where_they_stand() -> None:
    source = (
        '@pytest.mark.behaviour("A1", "B2")\n@other\ndef test_x(): ...\n@pytest.mark.behaviour("C3")\ndef f(): ...\n'
    )
    assert list(python_tags(source)) == ["A1", "B2"]
    assert list(cpp_tags("// behaviour: A1, B2\nTEST_F(Pool, Works) {\n// behaviour of the pool\n")) == ["A1", "B2"]
    with pytest.raises(AssertionError, match="no test"):
        list(cpp_tags("// behaviour: A1\n\nTEST(Pool, Works) {"))


def test_a_malformed_line_is_refused() -> None:
    assert entries_of("- A1 Works; differs: a, b; shown by bench: row: x, y") == [
        Entry(behaviour="A1", title="Works", bench="row: x, y")
    ]
    for line in ("- A Works", "- Z1 Works", "- A1"):
        with pytest.raises(AssertionError, match="not a behaviour"):
            entries_of(line)
