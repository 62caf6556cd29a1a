"""Files and the environment as sources of a configuration: formats, names, refusals, origins, secrets."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, SecretStr

from node_runtime.config import ComputeNodeConfig
from node_runtime.config_sources import Given, read_config_file, read_environment, resolve
from node_runtime.errors import BadConfig


class ToolConfig(ComputeNodeConfig):
    role_name: ClassVar[str] = "tool"

    peers: tuple[str, ...] = Field(default=(), description="Others.")
    token: SecretStr = Field(default=SecretStr(""), max_length=8, description="A secret.")


def _values(layer: dict[str, Given]) -> dict[str, object]:
    return {name: given.value for name, given in layer.items()}


def _file(directory: Path, text: str, name: str = "node.yaml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "role: tool\nmodel: m\nmax-batch-size: 3\npeers: [a, b]\n"),
        ("c.json", '{"role": "tool", "model": "m", "max_batch_size": 3, "peers": ["a", "b"]}'),
        ("c.toml", 'role = "tool"\nmodel = "m"\nmax_num_seqs = 3\npeers = ["a", "b"]\n'),
    ],
)
def test_a_file_may_be_yaml_json_or_toml(tmp_path: Path, name: str, text: str) -> None:
    layer = read_config_file(_file(tmp_path, text, name), ToolConfig, role="tool")
    assert _values(layer) == {"model": "m", "max_batch_size": 3, "peers": ["a", "b"]}
    assert {given.origin for given in layer.values()} == {str(tmp_path / name)}


def test_an_empty_file_gives_nothing(tmp_path: Path) -> None:
    assert read_config_file(_file(tmp_path, "# nothing yet\n"), ToolConfig) == {}


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("c.yaml", "max_bach_size: 3\n", 'key "max_bach_size" is unknown, did you mean "max_batch_size"?'),
        ("c.yaml", "zzz: 3\n", 'key "zzz" is unknown; known keys: adapter, advertise_host'),
        ("c.yaml", "max_batch_size: 3\nmax-num-seqs: 4\n", 'key "max_num_seqs" repeats "max_batch_size"'),
        ("c.yaml", "port: 3\nport: 4\n", 'key "port" is given twice in line 2'),
        ("c.yaml", "drain-grace-s: 3\ndrain_grace_s: 4\n", 'key "drain_grace_s" is given twice'),
        ("c.yaml", "role: decode\nmodel: m\n", "role: 'decode' given, this is a tool"),
        ("c.yaml", "- a\n", "the top level must map keys to values, found list"),
        ("c.yaml", "a: [\n", "while parsing"),
        ("c.yaml", "? [a]\n: 1\n", "found unhashable key in line 1"),
        ("c.json", "{", "config file"),
        ("c.json", '{"port": 1, "port": 2}', 'key "port" is given twice'),
        ("c.toml", "port = 1\nport = 2\n", "config file"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    file = _file(tmp_path, text, name)
    with pytest.raises(BadConfig) as refusal:
        read_config_file(file, ToolConfig, role="tool")
    assert str(file) in str(refusal.value)
    assert complaint in str(refusal.value)


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"none\.yaml"):
        read_config_file(tmp_path / "none.yaml", ToolConfig)


def test_each_field_is_a_variable_of_the_environment() -> None:
    environment = {
        "PDMESH_MEMORY": "2GiB",
        "PDMESH_MAX_NUM_SEQS": "8",
        "PDMESH_ENABLE_PREFIX_CACHE": "false",
        "PDMESH_PEERS": "a:1, b:2",
        "PDMESH_HOST": "",
        "PATH": "/bin",
    }
    layer = read_environment(ToolConfig, environment)
    assert layer["max_batch_size"].origin == "PDMESH_MAX_NUM_SEQS"
    config = resolve(ToolConfig, {"model": Given(value="m", origin="test")}, layer).config
    assert (config.memory, config.max_batch_size, config.enable_prefix_cache) == (2**31, 8, False)
    assert (config.peers, config.host) == (("a:1", "b:2"), "127.0.0.1")


def test_a_misspelled_variable_is_refused_and_one_that_is_somebody_elses_is_not() -> None:
    with pytest.raises(BadConfig, match="PDMESH_MEMROY is unknown, did you mean PDMESH_MEMORY"):
        read_environment(ToolConfig, {"PDMESH_MEMROY": "1GiB"})
    others = {"PDMESH_ROUTER": "r:1", "PDMESH_READY_FILE": "/f", "PDMESH_ROUTER_SERVICE_HOST": "10.0.0.1"}
    assert read_environment(ToolConfig, others) == {}


def test_what_kubernetes_says_of_a_service_called_pdmesh_is_not_taken_for_a_port() -> None:
    assert read_environment(ToolConfig, {"PDMESH_PORT": "tcp://10.0.0.1:7700"}) == {}


def test_a_later_layer_wins_and_the_origins_tell() -> None:
    file = {"model": Given(value="m", origin="f"), "port": Given(value=1, origin="f")}
    resolved = resolve(ToolConfig, file, {"port": Given(value="2", origin="PDMESH_PORT")})
    assert resolved.config.port == 2
    assert resolved.origins == {"model": "f", "port": "PDMESH_PORT"}


def test_a_wrong_value_is_named_with_its_key_its_limit_and_its_origin() -> None:
    layer = {"model": Given(value="m", origin="f"), "port": Given(value="70000", origin="PDMESH_PORT")}
    with pytest.raises(BadConfig, match=r"port: .*65535, got '70000' \(from PDMESH_PORT\)"):
        resolve(ToolConfig, layer)


def test_no_message_shows_a_secret(tmp_path: Path) -> None:
    secret = "hunter2hunter2"
    refusals = []
    for layer in (
        {"token": Given(value=secret, origin="f")},
        {"otlp_endpoint": Given(value=f"https://user:{secret}@host", origin="f")},
    ):
        with pytest.raises(BadConfig) as refusal:
            resolve(ToolConfig, {"model": Given(value="m", origin="f")}, layer)
        refusals.append(str(refusal.value))
    with pytest.raises(BadConfig) as refusal:
        read_config_file(_file(tmp_path, f'token: "{secret}\n'), ToolConfig)
    refusals.append(str(refusal.value))
    assert [secret in text for text in refusals] == [False, False, False]
    assert "token: " in refusals[0]
    assert "otlp_endpoint: expected host:port" in refusals[1]
