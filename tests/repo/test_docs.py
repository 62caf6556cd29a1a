"""The pages lead where they say, and name no command and no option that does not exist."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup

from node_runtime.config import FIELD_ALIASES, format_size
from pdmesh_cli.config_commands import ROLE_CONFIGS
from pdmesh_cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
OF_THE_CHART = ("helm/pdmesh/README.md",)
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# `--name`, but neither a rule of a table nor the middle of a word.
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])")
_CALL = re.compile(r"^(?:\$ )?(?:\S+=\S+ )*(?:\.venv/bin/)?pdmesh ([a-z]+)", re.MULTILINE)
# Of this project, so that files of users (`prompts.jsonl`, `tls.key`) and of models (`config.json`) are left alone.
_SOURCE_FILE = re.compile(r"`([\w/.-]+\.(?:py|cpp|h|proto|sh))`")
_QUOTED_CALL = re.compile(r"`pdmesh ([a-z]+)")
# An option with its default in brackets: `--name` (64), (`off`, decode), (`--other-name`, 64), (4 MiB).
_DEFAULT = re.compile(r"`--([a-z-]+)` \((?:`--[a-z-]+`, )?(\d[\d.]*(?: ?[KMG]iB)?|`\w+`)")
# Of other programs: helm, guidellm, aiperf, smg, and builders of images.
_OF_OTHERS = frozenset(
    {
        *(
            "set",
            "build-arg",
            "build-context",
            "backend",
            "profile",
            "constraint",
            "data",
            "output",
            "tokenizer",
            "url",
            "ui",
        ),
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


def _ends(file: str) -> Iterator[int]:
    """Where the file's path can begin."""
    yield 0
    yield from (position + 1 for position, character in enumerate(file) if character == "/")


@cache
def _files() -> frozenset[str]:
    """Paths of what is in the repository or its packages' folders; not what was built or installed."""
    skipped = {".venv", "build", ".git", "__pycache__"}
    found = []
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if name not in skipped]
        found += [str((Path(folder) / name).relative_to(ROOT)) for name in names]
    return frozenset(found)


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
def test_every_source_file_that_a_page_names_exists(page: str) -> None:
    """By its path, by the end of it, or by its name alone."""
    ends = {file[position:] for file in _files() for position in _ends(file)}
    assert set(_SOURCE_FILE.findall(_FENCED.sub("", _read(page)))) <= ends


@pytest.mark.parametrize("page", PAGES)
def test_every_option_that_a_page_names_is_one_of_some_command(page: str) -> None:
    known = {"help"}.union(_OF_OTHERS, *_commands().values())
    wrong = set(_OPTION.findall(_read(page))) - known
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_calls_exists(page: str) -> None:
    text = _read(page)
    called = {name for block in _FENCED.findall(text) for name in _CALL.findall(block)}
    assert called | set(_QUOTED_CALL.findall(text)) <= _commands().keys()


def test_operations_tells_of_every_command_and_the_options_named_beside_it_are_its_own() -> None:
    section = _read("docs/OPERATIONS.md").split("\n## Commands\n")[1].split("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| `pdmesh .*$", section, re.MULTILINE)]
    named = {re.findall(r"`pdmesh ([a-z]+)", row[0])[0]: row for row in rows}
    assert named.keys() == _commands().keys()
    for row in rows:
        name = re.findall(r"`pdmesh ([a-z]+)", row[0])[0]
        assert set(_OPTION.findall(row[-1])) <= _commands()[name], row[0]


def _defaults(option: str) -> set[str]:
    """As a page may write those of all roles that have it."""
    name = option.replace("-", "_")
    name = next((field for field, aliases in FIELD_ALIASES.items() if name in aliases), name)
    fields = [config.model_fields[name] for config in ROLE_CONFIGS.values() if name in config.model_fields]
    written = set()
    for default in (field.default for field in fields):
        written |= {str(default), f"`{default}`"}
        if isinstance(default, float):
            written.add(f"{default:g}")
        elif isinstance(default, int):
            written.add(format_size(default))
    return written


def test_the_defaults_that_pages_tell_are_those_of_the_code() -> None:
    told = [match for page in PAGES for match in _DEFAULT.findall(_read(page))]
    assert len(told) > 20
    assert [(option, value) for option, value in told if value.replace(" ", "") not in _defaults(option)] == []
