"""`python -m <role>_node FILE`: a compute node from one configuration file. The `pdmesh` command offers the flags."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import NoReturn, TypeVar

import yaml

from node_runtime.config import ComputeNodeConfig, load_config
from node_runtime.errors import BadConfig
from node_runtime.lifecycle import EXIT_BAD_CONFIG, run_node, setup_logging

ConfigT = TypeVar("ConfigT", bound=ComputeNodeConfig)


def run_from_file(
    arguments: list[str], config_class: type[ConfigT], serve: Callable[[ConfigT], Coroutine[object, object, int]]
) -> NoReturn:
    """Exits with status 2 for a configuration that is wrong."""
    try:
        config = load_config(config_class, _read_values(arguments, config_class.role_name))
    except BadConfig as error:
        print(f"pdmesh {config_class.role_name}: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
    setup_logging(config.node_id, config.log_level)
    run_node(serve(config))


def _read_values(arguments: list[str], role_name: str) -> dict[str, object]:
    if len(arguments) != 1:
        raise BadConfig(f"one configuration file expected for a {role_name} node, {len(arguments)} arguments given")
    try:
        values = yaml.safe_load(Path(arguments[0]).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadConfig(f"{arguments[0]}: {error}") from error
    if not isinstance(values, dict):
        raise BadConfig(f"{arguments[0]}: the top level must map keys to values")
    return values
