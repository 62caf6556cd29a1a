"""How tensor-parallel ranks share the heads of a layer: the one rule that recipes, models and transfers follow.

Heads are split evenly over the ranks; where there are fewer heads than ranks, each is repeated on equally many
neighbouring ranks. Knows no field, layer or process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cache_runtime.errors import CacheConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRank:
    """One of `size` ranks that compute the heads of every layer together. Raises CacheConfigError naming the field."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise CacheConfigError(f"tensor rank {self.rank} is outside [0, {self.size})")

    def heads(self, num_heads: int) -> range:
        """The heads of this rank, of `num_heads` over all ranks. Raises CacheConfigError when they do not share out."""
        num_shares = count_shares(num_heads, self.size)
        if num_shares is None:
            raise CacheConfigError(
                f"{num_heads} heads can neither be split over {self.size} tensor ranks nor be repeated on them"
            )
        heads_per_share = num_heads // num_shares
        share = self.rank * num_shares // self.size
        return range(share * heads_per_share, (share + 1) * heads_per_share)


ONLY_RANK: Final = TensorRank()
"""The rank of a node that shares its heads with nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSection:
    """A stretch of a partitioned axis: `num_heads` heads over all ranks, each `head_width` elements long.

    An axis of several sections holds, on every rank, the rank's heads of the first section, then those of the second.
    Raises CacheConfigError naming the field.
    """

    num_heads: int
    head_width: int = 1

    def __post_init__(self) -> None:
        for name, value in (("num_heads", self.num_heads), ("head_width", self.head_width)):
            if value < 1:
                raise CacheConfigError(f"head section: {name} must be at least 1, got {value}")

    @property
    def extent(self) -> int:
        """Elements of the axis over all ranks."""
        return self.num_heads * self.head_width

    def extent_on(self, rank: TensorRank) -> int:
        """Elements of the axis on one rank. Raises CacheConfigError when the heads do not share out."""
        return len(rank.heads(self.num_heads)) * self.head_width


def count_shares(num_heads: int, num_ranks: int) -> int | None:
    """Different parts into which so many heads are cut for so many ranks; None when that does not come out even."""
    if num_heads % num_ranks == 0:
        return num_ranks
    return num_heads if num_ranks % num_heads == 0 else None
