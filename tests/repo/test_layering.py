"""Runs the import contracts of pyproject.toml, and proves that they would catch a violation."""

from __future__ import annotations

import re
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


# By module: an import that breaks a contract, and a word of that contract's name.
VIOLATIONS = {
    "cache_runtime.arena": ("import node_runtime", "Layers"),
    "scheduler_core.extra": ("import cache_runtime", "Layers"),
    "prefill_node.service": ("import decode_node", "Layers"),
    "cache_runtime.mapping": ("import mooncake", "Mooncake"),
    "decode_node.service": ("import grpc", "gRPC"),
    "decode_node.server": ("from opentelemetry import trace", "OpenTelemetry"),
    "router_node.service": ("import torch", "no torch"),
    "router_node.server": ("import uvicorn", "HTTP"),
    "router_node.answer": ("import llguidance", "grammar"),
    "decode_node.receiver": ("import smg_grpc_proto", "gateway"),
}


@pytest.fixture(scope="module")
def complaint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is said of a project with all of the violations: the broken contracts one after the other."""
    root = tmp_path_factory.mktemp("violations")
    empty_project(root)
    for module, (line, _) in VIOLATIONS.items():
        (root / f"{module.replace('.', '/')}.py").write_text(line + "\n", encoding="utf-8")
    result = lint_imports(root)
    assert result.returncode != 0, result.stdout
    return result.stdout


@pytest.mark.parametrize("module", VIOLATIONS)
def test_a_planted_violation_breaks_its_contract(module: str, complaint: str) -> None:
    line, contract = VIOLATIONS[module]
    assert any(contract in row for row in complaint.splitlines() if row.endswith("BROKEN")), complaint
    _, _, details = complaint.partition("Broken contracts")
    (section,) = [part for part in sections_of(details) if contract in part.splitlines()[0]]
    assert f"{module} -> {line.split()[1]} " in section, complaint


def sections_of(details: str) -> list[str]:
    """A broken contract each: its name, underlined by dashes, and the imports that break it."""
    return re.split(r"\n(?=[^\n]+\n-+\n)", details)


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
