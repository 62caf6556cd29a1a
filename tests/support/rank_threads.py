"""The tensor ranks of a node as threads of this process: every rank has a model part, a scheduler and an arena.

Rank 0 is the caller's, the others follow it, as processes would. All arenas are in one process, so the leader's data
plane reaches them as it reaches those that it has mapped.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unit.model_runtime.thread_ranks import Meeting

from model_runtime.executor import ModelExecutor
from node_runtime.engine.ranks.follower import Follower
from node_runtime.engine.ranks.leader import Followers
from node_runtime.engine.ranks.link import RankLink
from node_runtime.engine.scheduler import RankGone
from scheduler_core import Scheduler

JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """One rank."""

    executor: ModelExecutor
    scheduler: Scheduler


class RankThreads:
    """`RankProcesses` of ranks that are threads."""

    def __init__(self, meeting: Meeting, parts: Sequence[RankPart]) -> None:
        """`parts` by rank; the first is the leader's and is not run here."""
        self.parts = tuple(parts)
        self.failures: list[BaseException] = []
        self._meeting = meeting
        self._on_lost: Callable[[BaseException], None] = self.failures.append
        self._links: list[RankLink] = []
        self._ends: list[RankLink] = []
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        for rank, part in enumerate(self.parts[1:], start=1):
            self._start(rank, part)

    @property
    def followers(self) -> Followers:
        return Followers(self._links)

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        self._on_lost = on_lost

    def kill(self, rank: int) -> None:
        """Ends a rank as the death of its process would: nothing is said, and nobody meets it any more."""
        self._ends[rank - 1].close()
        self._meeting.barrier.abort()

    def close(self) -> None:
        """Waits until everything that was ordered is carried out."""
        self._is_closing = True
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
            assert not thread.is_alive()

    def _start(self, rank: int, part: RankPart) -> None:
        ours, theirs = socket.socketpair()
        self._links.append(RankLink(ours, f"tensor rank {rank}"))
        link = RankLink(theirs, "tensor rank 0")
        self._ends.append(link)
        follower = Follower(link, part.scheduler, part.executor)

        def run() -> None:
            try:
                follower.run()
            except BaseException as error:
                self.failures.append(error)
            finally:
                link.close()
                if not self._is_closing:
                    self._meeting.barrier.abort()
                    self._on_lost(RankGone(f"tensor rank {rank} ended"))

        self._threads.append(threading.Thread(target=run, name=f"tensor rank {rank}", daemon=True))
        self._threads[-1].start()
