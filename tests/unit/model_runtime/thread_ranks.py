"""Ranks as threads of this process: the same calls as between processes, without any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from model_runtime.errors import RankGroupError
from model_runtime.rank_group import RankGroup

T = TypeVar("T")
TIMEOUT_S = 60.0


class Meeting:
    """Where the ranks leave what they gather."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size

    def ranks(self) -> list[RankGroup]:
        return [ThreadRank(rank, self) for rank in range(self.size)]


class ThreadRank:
    """One of the threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        self._meeting.slots[self._rank] = tensor.clone()
        try:
            self._meeting.barrier.wait()
            gathered = list(self._meeting.slots)
            self._meeting.barrier.wait()  # nobody leaves anything new before all have looked
        except threading.BrokenBarrierError as error:
            raise RankGroupError(f"rank {self._rank} of {self.size}: another rank is gone") from error
        return gathered


def run_ranks(size: int, work: Callable[[RankGroup], T]) -> list[T]:
    """What `work` returns on each rank, by rank. When one fails, the others are released and its error is raised."""
    meeting = Meeting(size)
    failures: list[BaseException] = []

    def run(rank: int) -> T:
        try:
            return work(ThreadRank(rank, meeting))
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    if failures:
        raise failures[0]
    return [future.result() for future in futures]
