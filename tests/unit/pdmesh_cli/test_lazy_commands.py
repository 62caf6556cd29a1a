"""Help and wrong usage come at once: what a command needs is imported when the command runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pdmesh_cli.lazy_commands import CommandEntry
from pdmesh_cli.main import COMMANDS, app

_HEAVY = ("grpc", "torch", "numpy", "opentelemetry", "starlette")
# Runs the command line with each of the given arguments in one process and prints which modules that imported.
_SCRIPT = f"""
import contextlib, io, json, sys
from pdmesh_cli.main import app
statuses = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            app(arguments, prog_name="pdmesh")
        except SystemExit as leaving:
            statuses.append(leaving.code)
print(json.dumps([statuses, [name for name in {_HEAVY!r} if name in sys.modules]]))
"""


def _imported_by(*commands: tuple[str, ...]) -> tuple[list[int], list[str]]:
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(commands)], capture_output=True, text=True, check=True, timeout=100
    )
    statuses, heavy = json.loads(run.stdout)
    return statuses, heavy


def test_no_help_and_no_wrong_usage_imports_anything_heavy() -> None:
    helps = [(entry.name, "--help") for entry in COMMANDS]
    wrong = [("genrate",), ("generate",), ("status", "--nothing"), ("decode", "--memory"), ("up", "--port", "x")]
    statuses, heavy = _imported_by(("--help",), *helps, ("config", "show", "--help"), *wrong)
    assert statuses == [0] * (len(helps) + 2) + [2] * len(wrong)
    assert heavy == []


def test_the_test_would_notice_a_heavy_import() -> None:
    assert _imported_by(("status", "--router", "127.0.0.1:1"))[1][0] == "grpc"


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_the_list_says_of_every_command_what_its_own_help_begins_with(entry: CommandEntry) -> None:
    first_paragraph = (entry.load().help or "").partition("\n\n")[0]
    assert " ".join(first_paragraph.split()) == entry.summary


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    result = CliRunner().invoke(app, ["statsu"])
    assert result.exit_code == 2
    assert "'status'" in result.stderr
