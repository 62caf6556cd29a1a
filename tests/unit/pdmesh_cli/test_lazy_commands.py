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
# Loads every command and calls some, each in the same process, and prints how they ended and what that imported; then a
# command that does something.
_SCRIPT = f"""
import contextlib, io, json, sys
from pdmesh_cli.main import COMMANDS, app

def status_of(*arguments):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            app(arguments, prog_name="pdmesh")
        except SystemExit as leaving:
            return leaving.code

for entry in COMMANDS:
    entry.load()
asked = ["--help"], ["decode", "--help"], ["config", "show", "--help"], ["trace", "--help"], ["version"]
wrong = ["genrate"], ["generate"], ["status", "--nothing"], ["decode", "--memory"], ["up", "--port", "x"]
for each in asked, wrong:
    print(json.dumps([status_of(*arguments) for arguments in each]))
for arguments in [], ["status", "--router", "127.0.0.1:1"]:
    status_of(*arguments)
    print(json.dumps([name for name in {_HEAVY!r} if name in sys.modules]))
"""


def test_no_help_and_no_wrong_usage_imports_anything_heavy() -> None:
    run = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=100)
    asked, wrong, heavy, heavy_behind_a_question = map(json.loads, run.stdout.splitlines())
    assert (asked, wrong) == ([0] * 5, [2] * 5)
    assert heavy == []
    assert "grpc" in heavy_behind_a_question, "what is imported would be noticed"


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_the_list_says_of_every_command_what_its_own_help_begins_with(entry: CommandEntry) -> None:
    first_paragraph = (entry.load().help or "").partition("\n\n")[0]
    assert " ".join(first_paragraph.split()) == entry.summary


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    result = CliRunner().invoke(app, ["statsu"])
    assert result.exit_code == 2
    assert "'status'" in result.stderr
