"""`python -m prefill_node FILE`."""

from __future__ import annotations

import sys

from node_runtime.command import run_from_file
from prefill_node.config import PrefillNodeConfig
from prefill_node.server import serve

if __name__ == "__main__":
    run_from_file(sys.argv[1:], PrefillNodeConfig, serve)
