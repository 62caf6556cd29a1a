"""Linear layers whose matrix is shared by tensor ranks, each holding some of its rows.

What the ranks compute is put side by side and never added up: a column is one rank's alone, computed from all inputs in
the order of one rank. So the result has the bits that one rank alone would give, which partial sums would not have.
"""

from __future__ import annotations

import torch

from model_runtime.layers.linear import Linear
from model_runtime.rank_group import RankGroup, gather_columns


class SplitLinear:
    """`part` has the columns of this rank; all parts are equally wide."""

    def __init__(self, part: Linear, ranks: RankGroup) -> None:
        self._part, self._ranks = part, ranks

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, depth], the same on all ranks -> float32[rows, columns of all ranks]."""
        return gather_columns(self._part(hidden), self._ranks)


class HeadsOutput:
    """A split layer behind heads that are themselves shared by the ranks."""

    def __init__(self, layer: SplitLinear, ranks: RankGroup) -> None:
        self._layer, self._ranks = layer, ranks

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """float32[rows, width of this rank's heads] -> float32[rows, columns of all ranks]."""
        return self._layer(gather_columns(heads, self._ranks))
