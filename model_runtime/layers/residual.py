"""The residual stream of a decoder: what every block reads through a norm and adds its outputs to."""

from __future__ import annotations

import torch

from model_runtime.layers.norm import RmsNorm


class ResidualStream:
    """[T, hidden] of one forward, beginning with what the embedding gives, which it takes over.

    An output that is added waits for the norm that reads it next: both are one pass over the rows.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        self._total = hidden
        self._waiting: torch.Tensor | None = None
        self._normed = torch.empty_like(hidden)

    def add(self, output: torch.Tensor) -> None:
        """`output` [T, hidden] must stay as it is until the stream is read."""
        if self._waiting is not None:
            self._total.add_(self._waiting)
        self._waiting = output

    def normed(self, norm: RmsNorm) -> torch.Tensor:
        """[T, hidden] of all that was added so far; the next call writes over it."""
        if self._waiting is None:
            return norm(self._total)
        norm.of_sum(self._waiting, self._total, self._normed)
        self._waiting = None
        return self._normed
