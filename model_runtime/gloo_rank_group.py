"""GlooRankGroup: ranks as processes that talk over torch.distributed with gloo. Its one importer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from model_runtime.errors import RankGroupError


class GlooRankGroup:
    """Joins the default process group of this process, so there is one at a time; `close` leaves it.

    A process that could not join must not try again: torch has counted the attempt, and the others would wait for it
    under another name.

    Ranks meet through `store_path`, a file that all of them reach and nobody has used before. Joining and every call
    wait at most `timeout_s`. Raises RankGroupError when the others do not come, ValueError for a rank outside
    [0, size).
    """

    def __init__(self, *, rank: int, size: int, store_path: Path, timeout_s: float) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is outside [0, {size})")
        self._rank, self._size = rank, size
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store_path.absolute()}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise RankGroupError(f"rank {rank} of {size}: could not join: {error}") from error

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self._size)]
        try:
            dist.all_gather(gathered, tensor.contiguous())
        except RuntimeError as error:
            raise RankGroupError(f"rank {self._rank} of {self._size}: all_gather failed: {error}") from error
        return gathered

    def close(self) -> None:
        dist.destroy_process_group()
