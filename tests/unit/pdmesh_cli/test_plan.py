"""`pdmesh plan`: what it shows of a model's cache, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from unit.model_runtime import tiny_gemma3

from pdmesh_cli.main import app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gemma3.save(tiny_gemma3.make_reference(), tmp_path_factory.mktemp("model"))


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], prog_name="pdmesh")
    return result.exit_code, result.stdout, result.stderr


def cells(text: str, first: str) -> list[str]:
    """The cells of the line that begins with `first`."""
    line = next(line for line in text.splitlines() if line.startswith(first))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_groups_packing_padding_and_capacity_are_shown(model: Path) -> None:
    code, out, _ = run(model, "--memory", "64MiB", "--prefix-granularity", 16)
    assert code == 0
    assert cells(out, "sliding") == ["sliding", "11 tokens", "6", "16", "24KiB", "1", "0.0%", "2,729"]
    assert cells(out, "full") == ["full", "everything", "1", "16", "4KiB", "6", "0.0%", "16,374"]
    assert cells(out, "blocks")[1].startswith("2,729 LCM blocks of 24KiB in 2 planes")
    assert cells(out, "memory") == ["memory", "64MiB, of which the arena takes 63.98MiB"]
    assert cells(out, "tokens per request") == ["tokens per request", "256"]
    assert cells(out, "requests at a time") == ["requests at a time", "64+"]
    # Less than the 2,729 * 6 * 16 tokens that the full group alone could hold.
    capacity_tokens = int(cells(out, "capacity")[1].split()[0].replace(",", ""))
    assert 0 < capacity_tokens < 2729 * 6 * 16


def test_more_memory_holds_more_requests_and_fewer_fit_the_longer_they_are(model: Path) -> None:
    def at_a_time(memory: str, max_model_len: int) -> int:
        _, out, _ = run(model, "--memory", memory, "--prefix-granularity", 16, "--max-model-len", max_model_len)
        return int(cells(out, "requests at a time")[-1].rstrip("+"))

    assert at_a_time("1MiB", 256) < at_a_time("2MiB", 256)
    assert at_a_time("1MiB", 256) < at_a_time("1MiB", 64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--memory", "1MiB", "--prefix-granularity", 4096),
            "memory_bytes 1048576 is too small: one prefix grain of 4096 tokens",
        ),
        (("--memory", "lots"), "memory"),
        (("--role", "router"), "role: expected one of fused, prefill, decode, got 'router'"),
        (("--max-model-len", 1000), "max_model_len=1000 is above the model's context of 256 tokens"),
        (("--max-batch-size", 64, "--token-budget", 8), "token_budget=8 must be at least max_batch_size=64"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(model: Path, arguments: tuple[object, ...], words: str) -> None:
    code, out, err = run(model, *arguments)
    assert code == 2
    assert words in err
    assert out == ""
    assert len(err.splitlines()) == 1


def test_a_model_whose_config_asks_for_what_it_cannot_have_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(model, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"sliding_window": 10**12}))
    code, out, err = run(changed)
    assert (code, out) == (2, "")
    assert "sliding.window_tokens must be at most 2147483647, got 1000000000000" in err
    assert len(err.splitlines()) == 1


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("a shopping list, long enough for a header")
    code, _, err = run(path)
    assert code == 2
    assert "not a GGUF file" in err


def test_what_it_is_made_with_is_named_where_it_is_missing() -> None:
    program = "import sys; sys.modules['torch'] = None; from pdmesh_cli.main import main; main()"
    command = (sys.executable, "-c", program, "plan", "smollm2")
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (
        2,
        "pdmesh: torch is not installed, and a plan is made with it; install it with: pip install 'pdmesh[compute]'\n",
    )
