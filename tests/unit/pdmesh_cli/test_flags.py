"""Options and files from pydantic models: names, precedence, refusals."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import BaseModel, BeforeValidator, Field
from typer.testing import CliRunner

from node_runtime.errors import BadConfig
from pdmesh_cli.flags import CONFIG_FILE_PARAMETER, config_parameters, flags_for, merged_values, read_config_file


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


def _parsed(*arguments: str) -> dict[str, object]:
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
    return merged_values(Settings, config_file, received)  # type: ignore[arg-type]


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
        merged_values(Settings, None, {"max_batch_size": 1, "max_num_seqs": 2})


@pytest.mark.parametrize(
    ("name", "text"), [("c.yaml", "model: m\nratio: 0.1\n"), ("c.json", '{"model": "m", "ratio": 0.1}')]
)
def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert _parsed("--config", str(file), "--ratio", "0.9") == {"model": "m", "ratio": 0.9}


def test_an_empty_file_gives_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("# nothing yet\n")
    assert read_config_file(file, Settings) == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_bach_size: 3\n", 'key "max_bach_size" is unknown, did you mean "max_batch_size"?'),
        ("zzz: 3\n", 'key "zzz" is unknown; known keys: cache, limit, max_batch_size'),
        ("max_batch_size: 3\nmax-num-seqs: 4\n", 'key "max_num_seqs" repeats "max_batch_size"'),
        ("- a\n", "the top level must map keys to values, found list"),
        ("a: [\n", "while parsing"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(BadConfig) as refusal:
        read_config_file(file, Settings)
    assert str(file) in str(refusal.value)
    assert complaint in str(refusal.value)


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"none\.yaml"):
        read_config_file(tmp_path / "none.yaml", Settings)


def test_values_become_the_flags_that_give_them_again() -> None:
    values = {"max_batch_size": 3, "cache": False, "peers": ["a", "b"], "limit": None, "plane": "slow"}
    flags = flags_for(values)  # type: ignore[arg-type]
    assert flags == ["--max-batch-size=3", "--no-cache", "--peers=a", "--peers=b", "--plane=slow"]
    assert _parsed(*flags) == {"max_batch_size": 3, "cache": False, "peers": ["a", "b"], "plane": "slow"}
