"""The `--help` texts, compared with recorded ones. PDMESH_UPDATE_GOLDEN=1 records them anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer import rich_utils
from typer.testing import CliRunner

from pdmesh_cli.main import app

_GOLDEN = Path(__file__).parent / "golden"
_COMMANDS = (
    "",
    "router",
    "prefill",
    "decode",
    "fused",
    "up",
    "demo",
    "plan",
    "generate",
    "chat",
    "bench",
    "status",
    "trace",
    "drain",
    "config check",
    "config show",
    "config schema",
    "fetch",
    "version",
    "sim",
)


@pytest.fixture(autouse=True)
def a_file_of_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the terminal and the environment of the test run say."""
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 100)
    monkeypatch.setattr(rich_utils, "FORCE_TERMINAL", False)
    monkeypatch.setattr(rich_utils, "COLOR_SYSTEM", None)
    monkeypatch.delenv("PDMESH_ROUTER", raising=False)


def _help(command: str) -> str:
    result = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="pdmesh")
    assert result.exit_code == 0
    return "\n".join(line.rstrip() for line in result.stdout.splitlines()).strip() + "\n"


@pytest.mark.parametrize("command", _COMMANDS)
def test_the_help_of_every_command_is_as_recorded(command: str) -> None:
    golden = _GOLDEN / f"help_{(command or 'pdmesh').replace(' ', '_')}.txt"
    text = _help(command)
    if os.environ.get("PDMESH_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert max(len(line) for line in text.splitlines()) <= 100
