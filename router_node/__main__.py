"""`python -m router_node FILE` runs a router."""

from __future__ import annotations

import sys

from node_runtime.command import run_from_file
from router_node.config import RouterConfig
from router_node.server import serve

if __name__ == "__main__":
    run_from_file(sys.argv[1:], RouterConfig, serve)
