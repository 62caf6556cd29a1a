"""`python -m node_runtime.engine.ranks.process_main FD`: a follower; the socket FD leads to its leader."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from model_runtime.errors import ModelError
from model_runtime.gloo_rank_group import GlooRankGroup
from node_runtime.config import ComputeNodeConfig
from node_runtime.engine.assembly import build_rank
from node_runtime.engine.ranks.follower import Follower
from node_runtime.engine.ranks.link import RankLink
from node_runtime.engine.ranks.processes import GATHER_TIMEOUT_S
from node_runtime.errors import BadConfig
from node_runtime.lifecycle import EXIT_BAD_CONFIG, EXIT_FAILURE, setup_logging
from scheduler_core import Role

_log = logging.getLogger(__name__)


def main() -> int:
    # A signal to the whole group asks the leader to drain; this rank is needed until the leader is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = RankLink(socket.socket(fileno=int(sys.argv[1])), "tensor rank 0")
    introduction = link.receive()
    if introduction is None:
        return 0
    order = json.loads(introduction)
    config = ComputeNodeConfig.model_validate(order["config"])
    setup_logging(f"{config.node_id}/rank{order['rank']}", config.log_level)
    try:
        group = GlooRankGroup(
            rank=order["rank"],
            size=config.tensor_parallel,
            store_path=Path(order["store"]),
            timeout_s=GATHER_TIMEOUT_S,
        )
        part = build_rank(
            config, Role[order["role"]], max_ready_ungranted=order["max_ready_ungranted"], tensor_ranks=group
        )
    except (BadConfig, ModelError) as error:
        link.send(json.dumps({"error": str(error)}).encode())
        return EXIT_BAD_CONFIG
    arena = part.executor.arena
    answer = {"num_lcm_blocks": part.executor.plan.num_lcm_blocks, "arena_bytes": arena.num_bytes}
    link.send(json.dumps(answer).encode())
    if arena.shared_descriptor is not None:
        link.send_descriptor(arena.shared_descriptor)
    try:
        Follower(link, part.scheduler, part.executor).run()
    except Exception as error:
        _log.critical("this rank cannot go on: %s", error, exc_info=error)
        return EXIT_FAILURE
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Taking the interpreter down would wait for a group whose other ranks may be gone.
    os._exit(status)
