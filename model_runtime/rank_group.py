"""RankGroup: processes that run one model on the same plans, and share its cache by blocks or its layers by heads.

The seam for what they tell one another. Knows no block, no head and no transport.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from cache_runtime.mapping.batch_metadata import BatchPlan
from model_runtime.errors import RankGroupError
from model_runtime.forward_batch import TokenPlan
from model_runtime.lora.token_groups import NO_ADAPTERS


class RankGroup(Protocol):
    """One of `size` ranks, as it sees the others. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """In [0, size)."""

    @property
    def size(self) -> int: ...

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Everybody's tensor, by rank; they have one shape and dtype. The values are the same on all ranks.

        Raises RankGroupError when a rank is gone or does not answer in time.
        """


class RankedPlan(BatchPlan, TokenPlan, Protocol):
    """The part of a plan that all ranks must agree on."""


class SingleRank:
    """Nobody else."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return (tensor,)


def gather_columns(part: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """[T, width] of each rank -> [T, size * width], in the order of the ranks."""
    return part if ranks.size == 1 else torch.cat(tuple(ranks.all_gather(part)), dim=1)


def check_same_plan(ranks: RankGroup, plan: RankedPlan, adapters: Mapping[str, str] = NO_ADAPTERS) -> None:
    """Raises RankGroupError when the ranks are about to carry out different plans, or with different adapters.

    `adapters`: digests of what changes the model, in hexadecimal digits, by request id. Nothing else would show it:
    each would attend to rows that the others computed for something else.
    """
    if ranks.size == 1:
        return
    digest = zlib.crc32(repr(sorted(adapters.items())).encode()) if adapters else 0
    for array in (plan.begins, plan.input_lengths, plan.token_ids, *plan.block_tables):
        digest = zlib.crc32(np.ascontiguousarray(array).data, digest)
    digests = [int(other) for other in ranks.all_gather(torch.tensor([digest]))]
    if len(set(digests)) > 1:
        raise RankGroupError(f"rank {ranks.rank} of {ranks.size}: plans differ, their digests are {digests}")
