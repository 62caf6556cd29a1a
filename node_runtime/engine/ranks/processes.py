"""FollowerProcesses: the other tensor ranks of a node, one child process each on this machine.

The leader starts them, gives each the configuration over a socket pair, and meets them in a gloo group for what the
layers exchange. On a node that hands caches over it maps their arenas, so that its data plane reaches all of them. A
follower that ends takes the node down; a leader that ends takes the followers with it, since their sockets close.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from cache_runtime.shared_memory import MappedMemory
from model_runtime.gloo_rank_group import GlooRankGroup
from node_runtime.config import ComputeNodeConfig
from node_runtime.engine.ranks.leader import Followers
from node_runtime.engine.ranks.link import RankLink, RankLost
from node_runtime.engine.scheduler import RankGone
from node_runtime.errors import BadConfig
from scheduler_core import Role

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
# How long one gather may take: the ranks are in the same layer, so this covers a slow machine and no more.
GATHER_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 10.0
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


class FollowerArena:
    """The arena of another rank, mapped into this process."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Takes the descriptor over. Raises ValueError and OSError like MappedMemory."""
        self.descriptor = descriptor
        try:
            self._memory = MappedMemory(descriptor, num_bytes, is_writable=True)
        except BaseException:
            self.close()
            raise

    @property
    def base_address(self) -> int:
        """In this process."""
        return self._memory.base_address

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def close(self) -> None:
        """Nobody can be handed the arena any more; it stays mapped as long as this object lives."""
        os.close(self.descriptor)


class FollowerProcesses:
    """Ranks 1 to `tensor_parallel` - 1 of the configuration. Blocking; raises BadConfig when they do not start."""

    def __init__(self, config: ComputeNodeConfig, role: Role, *, max_ready_ungranted: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pdmesh-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[RankLink] = []
        self._arenas: list[FollowerArena] = []
        self._is_closing = False
        # A fused node has no data plane.
        self._shares_arenas = role is not Role.FUSED
        store = Path(self._folder.name) / "store"
        # All ranks are on this machine, whatever its name resolves to.
        os.environ.setdefault(_INTERFACE_VARIABLE, "lo")
        try:
            for rank in range(1, config.tensor_parallel):
                self._start(rank).send(_introduction(config, role, rank, store, max_ready_ungranted))
            self.group = GlooRankGroup(
                rank=0, size=config.tensor_parallel, store_path=store, timeout_s=GATHER_TIMEOUT_S
            )
        except RankLost as error:
            self._end_processes()
            raise BadConfig(str(error)) from error
        except BaseException:
            self._end_processes()
            raise

    @property
    def followers(self) -> Followers:
        return Followers(self._links)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of ranks 1 and up."""
        return tuple(process.pid for process in self._processes)

    @property
    def arenas(self) -> tuple[FollowerArena, ...]:
        """Those of ranks 1 and up, once they are ready; none on a fused node."""
        return tuple(self._arenas)

    def wait_until_ready(self, num_lcm_blocks: int) -> None:
        """Until every rank has built its part, with as many parents as the leader's. Raises BadConfig."""
        for link in self._links:
            try:
                self._welcome(link, num_lcm_blocks)
            except (RankLost, ValueError, OSError) as error:
                raise BadConfig(str(error)) from error

    def _welcome(self, link: RankLink, num_lcm_blocks: int) -> None:
        frame = link.receive(START_TIMEOUT_S)
        if frame is None:
            raise BadConfig(f"{link.name}: ended while it started; see its log")
        answer = json.loads(frame)
        if "error" in answer:
            raise BadConfig(f"{link.name}: {answer['error']}")
        if answer["num_lcm_blocks"] != num_lcm_blocks:
            raise BadConfig(f"{link.name} has {answer['num_lcm_blocks']} LCM blocks, rank 0 has {num_lcm_blocks}")
        if self._shares_arenas:
            self._arenas.append(FollowerArena(link.receive_descriptor(START_TIMEOUT_S), answer["arena_bytes"]))

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """Calls `on_lost`, on a thread of its own, should a rank end before `close`."""
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._wait, args=(rank, process, on_lost), name=f"rank {rank}", daemon=True).start()

    def close(self) -> None:
        """Ends the processes. Idempotent; the engine must have stopped."""
        if self._is_closing:
            return
        self._end_processes()
        for arena in self._arenas:
            arena.close()
        self.group.close()

    def _start(self, rank: int) -> RankLink:
        ours, theirs = socket.socketpair()
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "node_runtime.engine.ranks.process_main", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            )
        link = RankLink(ours, f"tensor rank {rank}")
        self._links.append(link)
        return link

    def _wait(self, rank: int, process: subprocess.Popen[bytes], on_lost: Callable[[BaseException], None]) -> None:
        status = process.wait()
        if not self._is_closing:
            on_lost(RankGone(f"tensor rank {rank} ended with status {status}"))

    def _end_processes(self) -> None:
        self._is_closing = True
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _log.warning("a tensor rank did not end within %g s and is killed", _CLOSE_TIMEOUT_S)
                process.kill()
                process.wait()
        self._folder.cleanup()


def _introduction(config: ComputeNodeConfig, role: Role, rank: int, store: Path, max_ready_ungranted: int) -> bytes:
    return json.dumps(
        {
            "config": config.model_dump(mode="json", include=set(ComputeNodeConfig.model_fields)),
            "role": role.name,
            "rank": rank,
            "store": str(store),
            "max_ready_ungranted": max_ready_ungranted,
        }
    ).encode()
