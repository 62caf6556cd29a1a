"""A node that cannot start says why in one line and exits; no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.mesh import COMPUTE, Mesh
from support.preloaded import origin


def start_fails(*arguments: str, python_path: Path | None = None) -> str:
    """Runs `pdmesh` with arguments that must fail; returns what it printed. `python_path` comes before all modules."""
    if python_path is None:
        result = origin().run(arguments, environment=os.environ, timeout_s=90.0)
    else:
        command = [sys.executable, "-m", "pdmesh_cli.main", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(python_path)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    output = result.stdout + result.stderr
    assert result.returncode in (1, 2), output
    assert "Traceback" not in output, output
    return " ".join(output.split())


def test_a_port_in_use_is_named(mesh: Mesh, model_path: Path) -> None:
    port = mesh.nodes["prefill"].address.rsplit(":", 1)[1]
    output = start_fails("prefill", "--model", str(model_path), "--port", port, *COMPUTE)
    assert f"127.0.0.1:{port}" in output
    assert "in use" in output


def test_rdma_without_a_device_is_refused_instead_of_falling_back(model_path: Path) -> None:
    output = start_fails("prefill", "--model", str(model_path), "--port", "0", *COMPUTE, "--transfer-protocol", "rdma")
    assert "rdma" in output.lower()
    assert "/sys/class/infiniband" in output


@pytest.mark.parametrize(
    ("module", "role", "options", "extra"),
    [
        ("torch", "fused", (), "pdmesh[compute]"),
        ("mooncake", "prefill", ("--data-plane", "mooncake"), "pdmesh[cpu]"),
    ],
)
def test_a_missing_optional_part_says_how_to_install_it(
    model_path: Path, tmp_path: Path, module: str, role: str, options: tuple[str, ...], extra: str
) -> None:
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text(f"raise ModuleNotFoundError('no {module}', name='{module}')")
    output = start_fails(role, "--model", str(model_path), "--port", "0", *COMPUTE, *options, python_path=tmp_path)
    assert module in output
    assert f"pip install '{extra}'" in output


def test_a_truncated_model_file_is_named(model_path: Path, tmp_path: Path) -> None:
    truncated = tmp_path / "cut.gguf"
    truncated.write_bytes(model_path.read_bytes()[:40_000_000])
    for role in ("prefill", "fused"):
        output = start_fails(role, "--model", str(truncated), "--port", "0", *COMPUTE)
        assert "cut.gguf" in output
        assert "truncated" in output.lower()


def test_a_corrupt_model_file_is_named(tmp_path: Path) -> None:
    corrupt = tmp_path / "noise.gguf"
    corrupt.write_bytes(b"GGUF" + bytes(range(256)) * 64)
    nodes = {"decode": ("--prefill", "127.0.0.1:1"), "router": ("--fused", "127.0.0.1:1")}
    for role, options in nodes.items():
        assert "noise.gguf" in start_fails(role, "--model", str(corrupt), "--port", "0", *options)


def test_a_missing_model_file_is_named() -> None:
    assert "/no/such/model.gguf" in start_fails("fused", "--model", "/no/such/model.gguf", "--port", "0")


def test_a_budget_too_small_for_one_block_names_both_sizes(model_path: Path) -> None:
    output = start_fails("fused", "--model", str(model_path), "--port", "0", "--memory", "1MiB")
    assert "memory" in output
    assert "1048576" in output or "1.0 MiB" in output or "1MiB" in output


def test_an_arena_that_the_machine_cannot_hold_names_both_sizes(model_path: Path) -> None:
    output = start_fails("fused", "--model", str(model_path), "--port", "0", "--memory", "900TiB")
    assert "arena" in output
    assert str(900 * 2**40)[:4] in output or "900" in output
    assert "available" in output


@pytest.mark.parametrize(
    ("option", "value"),
    [("--prefix-granularity", "0"), ("--memory", "lots"), ("--max-batch-size", "-1"), ("--kernel-page-size", "7")],
)
def test_a_bad_option_is_named(model_path: Path, option: str, value: str) -> None:
    output = start_fails("fused", "--model", str(model_path), "--port", "0", option, value)
    assert value in output
    assert option in output or option.strip("-").replace("-", "_") in output


def test_an_eviction_policy_without_a_prefix_cache_is_refused(model_path: Path) -> None:
    options = ("--eviction-policy", "aged_frequency", "--no-enable-prefix-cache")
    output = start_fails("fused", "--model", str(model_path), "--port", "0", *COMPUTE, *options)
    assert "eviction_policy" in output
    assert "enable_prefix_cache" in output


def test_an_unknown_key_in_a_config_file_is_named(model_path: Path, tmp_path: Path) -> None:
    config = tmp_path / "fused.yaml"
    config.write_text(f"model: {model_path}\nprefix_granualrity: 64\n")
    output = start_fails("fused", "--config", str(config))
    assert "prefix_granualrity" in output
