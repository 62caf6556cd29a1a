"""The pages lead where they say, and name no command and no option that does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup

from pdmesh_cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
OF_THE_CHART = ("helm/pdmesh/README.md",)
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# `--name`, but neither a rule of a table nor the middle of a word.
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])")
_COMMAND = re.compile(r"^(?:\.venv/bin/)?pdmesh ([a-z]+)|`pdmesh ([a-z]+)", re.MULTILINE)
# Of other programs: helm, guidellm, aiperf, smg, and builders of images.
_OF_OTHERS = frozenset(
    {
        *("set", "build-arg", "backend", "profile", "constraint", "data", "output", "tokenizer", "url", "ui"),
        *("endpoint-type", "streaming", "use-server-token-count", "synthetic-input-tokens-mean", "output-tokens-mean"),
        *("request-count", "worker-urls", "pd-disaggregation", "policy"),
    }
)


def _read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _anchors(page: str) -> set[str]:
    """As the usual forges make them of headings."""
    headings = _HEADING.findall(_FENCED.sub("", _read(page)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *OF_THE_CHART])
def test_every_link_leads_to_a_page_and_a_heading_that_exist(page: str) -> None:
    wrong = []
    for link in _LINK.findall(_FENCED.sub("", _read(page))):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        leads_somewhere = target.exists() and (
            not anchor or anchor in _anchors(str(target.resolve().relative_to(ROOT)))
        )
        if not leads_somewhere:
            wrong.append(link)
    assert not wrong


@cache
def _commands() -> dict[str, frozenset[str]]:
    """Their options, by name; those of commands below a command with it."""
    return {entry.name: frozenset(_options(entry.load())) for entry in COMMANDS}


def _options(command: TyperCommand | TyperGroup) -> Iterator[str]:
    for parameter in command.params:
        yield from (option.removeprefix("--") for option in (*parameter.opts, *parameter.secondary_opts))
    if isinstance(command, TyperGroup):
        for below in command.commands.values():
            assert isinstance(below, TyperCommand | TyperGroup)
            yield from _options(below)


@pytest.mark.parametrize("page", PAGES)
def test_every_option_that_a_page_names_is_one_of_some_command(page: str) -> None:
    known = _OF_OTHERS.union(*_commands().values())
    wrong = set(_OPTION.findall(_read(page))) - known
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_calls_exists(page: str) -> None:
    called = {first or second for first, second in _COMMAND.findall(_read(page))}
    assert called <= _commands().keys()


def test_operations_tells_of_every_command_and_the_options_named_beside_it_are_its_own() -> None:
    section = _read("docs/OPERATIONS.md").split("\n## Commands\n")[1].split("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| `pdmesh .*$", section, re.MULTILINE)]
    named = {re.findall(r"`pdmesh ([a-z]+)", row[0])[0]: row for row in rows}
    assert named.keys() == _commands().keys()
    for row in rows:
        name = re.findall(r"`pdmesh ([a-z]+)", row[0])[0]
        assert set(_OPTION.findall(row[-1])) <= _commands()[name], row[0]
