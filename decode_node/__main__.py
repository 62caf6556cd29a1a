"""`python -m decode_node FILE` runs a decode node, `python -m decode_node fused FILE` a fused one."""

from __future__ import annotations

import sys

from decode_node.config import DecodeNodeConfig, FusedNodeConfig
from decode_node.server import serve
from node_runtime.command import run_from_file

if __name__ == "__main__":
    if sys.argv[1:2] == ["fused"]:
        run_from_file(sys.argv[2:], FusedNodeConfig, serve)
    run_from_file(sys.argv[1:], DecodeNodeConfig, serve)
