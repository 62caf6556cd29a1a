"""Runs the import contracts of pyproject.toml, and proves that they would catch a violation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "scheduler_core",
    "cache_runtime",
    "model_runtime",
    "node_runtime",
    "prefill_node",
    "decode_node",
    "router_node",
    "simulation",
    "pdmesh_cli",
)


# The editable install redirects the package names to this checkout; without its finder they are looked up in `root`.
LINT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
sys.path.insert(0, sys.argv.pop(1))
from importlinter.cli import lint_imports_command
lint_imports_command()
"""


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, str(root), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)


def empty_project(root: Path) -> None:
    """The same packages and contracts as the real project, without code."""
    shutil.copy(ROOT / "pyproject.toml", root)
    for package in PACKAGES:
        (root / package).mkdir()
        (root / package / "__init__.py").touch()
    for package in ("node_runtime/rpc", "model_runtime/text", "cache_runtime/transfer"):
        (root / package).mkdir()
        (root / package / "__init__.py").touch()


def test_the_code_keeps_the_import_contracts() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("cache_runtime/arena.py", "import node_runtime", "Layers"),
        ("scheduler_core/extra.py", "import cache_runtime", "Layers"),
        ("prefill_node/service.py", "import decode_node", "Layers"),
        ("cache_runtime/arena.py", "import mooncake", "Mooncake"),
        ("decode_node/service.py", "import grpc", "gRPC"),
        ("decode_node/service.py", "from opentelemetry import trace", "OpenTelemetry"),
        ("router_node/service.py", "import uvicorn", "HTTP"),
        ("router_node/service.py", "import llguidance", "grammar"),
        ("router_node/service.py", "import torch", "no torch"),
    ],
)
def test_a_planted_violation_breaks_its_contract(module: str, line: str, contract: str, tmp_path: Path) -> None:
    empty_project(tmp_path)
    path = tmp_path / module
    path.write_text(line + "\n", encoding="utf-8")
    result = lint_imports(tmp_path)
    assert result.returncode != 0, result.stdout
    broken = [row for row in result.stdout.splitlines() if row.endswith("BROKEN")]
    assert any(contract in row for row in broken), result.stdout


def test_torch_distributed_is_imported_by_one_module_alone() -> None:
    """The import contracts see packages of others as a whole, here torch."""
    importers = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "torch.distributed" in path.read_text(encoding="utf-8")
    ]
    assert importers == ["model_runtime/gloo_rank_group.py"]


def test_an_empty_project_keeps_every_contract(tmp_path: Path) -> None:
    empty_project(tmp_path)
    result = lint_imports(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_router_starts_without_torch() -> None:
    code = "import router_node.server, sys; assert 'torch' not in sys.modules and 'mooncake' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
