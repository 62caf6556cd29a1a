"""`pdmesh config`: what it accepts, what it refuses, what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pydantic import Field, SecretStr
from typer.testing import CliRunner, Result

from node_runtime.config import NodeConfig
from node_runtime.config_sources import Given, resolve
from pdmesh_cli.config_commands import ROLE_CONFIGS, effective_values, file_schema, resolve_arguments
from pdmesh_cli.main import app

_DECODE = "role: decode\nmodel: /m.gguf\nport: 7702\nprefill: [a:1]\nmemory: 8GiB\n"


def _run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["config", *arguments], env={"COLUMNS": "100", **environment})


@pytest.fixture
def decode_file(tmp_path: Path) -> Path:
    path = tmp_path / "decode.yaml"
    path.write_text(_DECODE, encoding="utf-8")
    return path


def test_a_good_file_is_good_for_the_role_that_it_names(decode_file: Path) -> None:
    result = _run("check", str(decode_file))
    assert (result.exit_code, result.stdout) == (0, f"{decode_file}: good for a decode node\n")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("role: decode\nmodel: m\nmemroy: 1GiB\n", 'key "memroy" is unknown, did you mean "memory"?'),
        ("role: decode\nmodel: m\nport: 70000\n", "port: Input should be less than or equal to 65535, got 70000"),
        ("role: baker\nmodel: m\n", "role: expected one of router, prefill, decode, fused, got 'baker'"),
        ("model: m\n", "say whose it is"),
    ],
)
def test_a_wrong_file_is_named_with_its_fault_and_status_two(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(text, encoding="utf-8")
    result = _run("check", str(path))
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert complaint in result.stderr


def test_all_files_are_checked_also_after_a_wrong_one(tmp_path: Path, decode_file: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("role: fused\n", encoding="utf-8")
    result = _run("check", str(wrong), str(decode_file))
    assert result.exit_code == 2
    assert "model: required" in result.stderr
    assert f"{decode_file}: good for a decode node" in result.stdout


def test_nodes_that_could_not_exchange_cache_are_named_with_what_differs(tmp_path: Path, decode_file: Path) -> None:
    prefill = tmp_path / "prefill.yaml"
    prefill.write_text("role: prefill\nmodel: /m.gguf\nmemory: 1GiB\n", encoding="utf-8")
    assert _run("check", str(decode_file), str(prefill)).exit_code == 0
    prefill.write_text("role: prefill\nmodel: /m.gguf\ndtype: bfloat16\n", encoding="utf-8")
    result = _run("check", str(decode_file), str(prefill))
    assert result.exit_code == 2
    assert f"dtype: {decode_file} has 'float32', {prefill} has 'bfloat16'" in result.stderr


def test_what_is_shown_is_what_a_node_would_run_with_and_says_where_it_is_from(decode_file: Path) -> None:
    result = _run("show", "--config", str(decode_file), "--port", "9", PDMESH_MAX_BATCH_SIZE="32")
    assert result.exit_code == 0, result.stderr
    shown = yaml.safe_load(result.stdout)
    assert (shown["role"], shown["port"], shown["max_batch_size"], shown["memory"]) == ("decode", 9, 32, "8GiB")
    assert (shown["host"], shown["prefill"], shown["max_model_len"]) == ("127.0.0.1", ["a:1"], None)
    origins = {line.split(":")[0]: line.split("# ")[1] for line in result.stdout.splitlines() if "# " in line}
    assert origins["port"] == "--port"
    assert origins["max_batch_size"] == "PDMESH_MAX_BATCH_SIZE"
    assert origins["memory"] == str(decode_file)
    assert origins["host"] == "default"


def test_what_is_shown_is_a_configuration_file_again(tmp_path: Path, decode_file: Path) -> None:
    first = _run("show", "--config", str(decode_file), "--max-message-bytes", "1234567")
    again = tmp_path / "again.yaml"
    again.write_text(first.stdout, encoding="utf-8")
    second = _run("show", "--config", str(again))
    assert second.exit_code == 0, second.stderr
    assert yaml.safe_load(second.stdout) == yaml.safe_load(first.stdout)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--role", "decode", "--memroy", "1GiB"), "--memroy"),
        (("--role", "decode"), "model: required"),
        ((), "role: required, one of router, prefill, decode, fused: --role decode"),
        (("--role", "decode", "--model", "m", "--port", "70000"), "got 70000 (from --port)"),
    ],
)
def test_what_a_node_would_refuse_cannot_be_shown(arguments: tuple[str, ...], complaint: str) -> None:
    result = _run("show", *arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_arguments_are_read_as_the_command_of_the_role_reads_them() -> None:
    resolved = resolve_arguments("router", None, ["--model", "m", "--prefill=a:1", "--decode", "b:2"], {})
    assert dict(resolved.config)["decode"] == ("b:2",)
    assert resolved.origins["prefill"] == "--prefill"


def test_a_secret_is_not_shown() -> None:
    class WithToken(NodeConfig):
        token: SecretStr = Field(default=SecretStr(""), description="Proof.")

    text = effective_values(resolve(WithToken, {"token": Given(value="hunter2", origin="PDMESH_TOKEN")}))
    assert "hunter2" not in text
    assert [line.split() for line in text.splitlines() if "PDMESH_TOKEN" in line] == [
        ["token:", "'***'", "#", "PDMESH_TOKEN"]
    ]


@pytest.mark.parametrize("role", ROLE_CONFIGS)
def test_the_schema_of_a_role_has_every_key_of_its_files_and_no_other(role: str) -> None:
    result = _run("schema", "--role", role)
    schema = json.loads(result.stdout)
    assert schema == file_schema(role)
    assert set(ROLE_CONFIGS[role].model_fields) < set(schema["properties"])
    assert schema["additionalProperties"] is False
    assert schema["properties"]["role"] == {"const": role}


def test_the_schema_takes_sizes_with_and_without_a_unit() -> None:
    memory = file_schema("decode")["properties"]["memory"]  # type: ignore[index]
    assert [choice["type"] for choice in memory["anyOf"]] == ["integer", "string"]
