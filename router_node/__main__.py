"""Runs a router from one configuration file: `python -m router_node FILE`. The `pdmesh` command offers the flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import yaml

from node_runtime.config import load_config
from node_runtime.errors import BadConfig
from node_runtime.lifecycle import EXIT_BAD_CONFIG, run_node, setup_logging
from router_node.config import RouterConfig
from router_node.server import serve


def main(arguments: list[str]) -> NoReturn:
    """Exits with status 2 for a configuration that is wrong."""
    try:
        config = _read_config(arguments)
    except BadConfig as error:
        print(f"pdmesh router: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
    setup_logging(config.node_id, config.log_level)
    run_node(serve(config))


def _read_config(arguments: list[str]) -> RouterConfig:
    if len(arguments) != 1:
        raise BadConfig("usage: python -m router_node FILE")
    try:
        values = yaml.safe_load(Path(arguments[0]).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadConfig(f"{arguments[0]}: {error}") from error
    if not isinstance(values, dict):
        raise BadConfig(f"{arguments[0]}: the top level must map keys to values")
    return load_config(RouterConfig, values)


if __name__ == "__main__":
    main(sys.argv[1:])
