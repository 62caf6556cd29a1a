"""Options from pydantic models: names, types, precedence."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import BaseModel, BeforeValidator, Field, SecretStr
from typer.testing import CliRunner

from node_runtime.errors import BadConfig
from pdmesh_cli.flags import CONFIG_FILE_PARAMETER, config_parameters, flags_for, layers_of


def _size(value: object) -> object:
    return 1024 if value == "1KiB" else value


class Settings(BaseModel):
    model: str = Field(description="Which model.")
    max_batch_size: int = Field(default=64, description="Most requests.")
    ratio: float = Field(default=0.5, description="A ratio.")
    memory: Annotated[int, BeforeValidator(_size)] = Field(default=7, description="A size.")
    cache: bool = Field(default=True, description="Reuse.")
    plane: Literal["fast", "slow"] = Field(default="fast", description="Plane.")
    peers: tuple[str, ...] = Field(default=(), description="Peers.")
    limit: int | None = Field(default=None, description="Limit. Default: none.")


def _merged(config_file: Path | None, flags: dict[str, object], environment: dict[str, str]) -> dict[str, object]:
    layers = layers_of(Settings, config_file, flags, environment)  # type: ignore[arg-type]
    return {name: given.value for layer in layers for name, given in layer.items()}


def _parsed(*arguments: str, environment: dict[str, str] | None = None) -> dict[str, object]:
    """What a command whose options come from Settings receives."""
    received: dict[str, object] = {}

    def command(**values: object) -> None:
        received.update(values)

    parameters = [CONFIG_FILE_PARAMETER, *config_parameters(Settings, panel_of=lambda name: None)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    app = typer.Typer(add_completion=False)
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    config_file = received.pop("config_file")
    assert config_file is None or isinstance(config_file, Path)
    return _merged(config_file, received, environment or {})


def test_only_options_that_were_given_reach_the_configuration() -> None:
    assert _parsed() == {}


def test_each_field_is_a_kebab_case_option_of_its_type() -> None:
    given = _parsed("--max-batch-size", "3", "--ratio=0.25", "--memory", "1KiB", "--plane=slow", "--limit=9")
    assert given == {"max_batch_size": 3, "ratio": 0.25, "memory": "1KiB", "plane": "slow", "limit": 9}


def test_a_bool_field_can_be_switched_both_ways() -> None:
    assert (_parsed("--no-cache"), _parsed("--cache")) == ({"cache": False}, {"cache": True})


def test_a_list_field_collects_every_occurrence() -> None:
    assert _parsed("--peers", "a:1", "--peers", "b:2") == {"peers": ["a:1", "b:2"]}


def test_an_alias_is_a_flag_and_a_file_key(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("max-num-seqs: 5\n")
    assert _parsed("--max-num-seqs", "4") == {"max_batch_size": 4}
    assert _parsed("--config", str(file)) == {"max_batch_size": 5}


def test_an_alias_beside_its_field_is_refused() -> None:
    with pytest.raises(BadConfig, match='option "max_num_seqs" repeats "max_batch_size"'):
        _merged(None, {"max_batch_size": 1, "max_num_seqs": 2}, {})


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nratio: 0.1\nlimit: 1\n")
    environment = {"PDMESH_RATIO": "0.2", "PDMESH_LIMIT": "2"}
    given = _parsed("--config", str(file), "--ratio", "0.9", environment=environment)
    assert given == {"model": "m", "ratio": 0.9, "limit": "2"}


def test_every_value_knows_where_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\n")
    layers = layers_of(Settings, file, {"max_num_seqs": 3}, {"PDMESH_RATIO": "0.2"})
    origins = {name: given.origin for layer in layers for name, given in layer.items()}
    assert origins == {"model": str(file), "ratio": "PDMESH_RATIO", "max_batch_size": "--max-num-seqs"}


def test_a_secret_has_no_option() -> None:
    class WithSecret(BaseModel):
        user: str = Field(default="", description="Who.")
        token: SecretStr = Field(default=SecretStr(""), description="Proof.")

    names = [parameter.name for parameter in config_parameters(WithSecret, panel_of=lambda name: None)]
    assert names == ["user"]


def test_values_become_the_flags_that_give_them_again() -> None:
    values = {"max_batch_size": 3, "cache": False, "peers": ["a", "b"], "limit": None, "plane": "slow"}
    flags = flags_for(values)  # type: ignore[arg-type]
    assert flags == ["--max-batch-size=3", "--no-cache", "--peers=a", "--peers=b", "--plane=slow"]
    assert _parsed(*flags) == {"max_batch_size": 3, "cache": False, "peers": ["a", "b"], "plane": "slow"}
