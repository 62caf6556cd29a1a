"""`python -m <role>_node FILE`: a node from a file and the environment. The `pdmesh` command offers flags as well."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import NoReturn, TypeVar

from node_runtime.config import NodeConfig
from node_runtime.config_sources import read_config_file, read_environment, resolve
from node_runtime.errors import BadConfig
from node_runtime.lifecycle import EXIT_BAD_CONFIG, run_node, setup_logging

ConfigT = TypeVar("ConfigT", bound=NodeConfig)


def run_from_file(
    arguments: list[str], config_class: type[ConfigT], serve: Callable[[ConfigT], Coroutine[object, object, int]]
) -> NoReturn:
    """Exits with status 2 for a configuration that is wrong."""
    try:
        config = _read_config(arguments, config_class)
    except BadConfig as error:
        print(f"pdmesh {config_class.role_name}: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
    setup_logging(config.node_id, config.log_level)
    run_node(serve(config))


def _read_config(arguments: list[str], config_class: type[ConfigT]) -> ConfigT:
    role = config_class.role_name
    if len(arguments) != 1:
        raise BadConfig(f"one configuration file expected for a {role} node, {len(arguments)} arguments given")
    file_layer = read_config_file(Path(arguments[0]), config_class, role=role)
    return resolve(config_class, file_layer, read_environment(config_class, os.environ)).config
