"""Linear layers without bias, and the token embedding, which may share its weight with one."""

from __future__ import annotations

import torch

from model_runtime.kernels.interface import Kernels, PackedWeight


class Linear:
    """[rows, depth] -> [rows, columns] by a weight[columns, depth], which it holds only as the kernels' packed copies.

    `parts` lie under one another: matrices that are quantised differently cannot be one.
    """

    def __init__(self, parts: tuple[PackedWeight, ...], kernels: Kernels) -> None:
        self._parts = parts
        self.num_columns = sum(part.num_columns for part in parts)
        self._kernels = kernels

    @property
    def weight(self) -> PackedWeight | None:
        """What `__call__` multiplies by, where it does nothing else in the running forward."""
        return self._parts[0] if len(self._parts) == 1 else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, depth] -> float32[rows, columns]."""
        output = torch.empty((hidden.shape[0], self.num_columns))
        if len(self._parts) == 1:
            self._kernels.multiply(hidden, self._parts[0], output)
            return output
        columns = torch.split(output, [part.num_columns for part in self._parts], dim=1)
        for part, part_output in zip(self._parts, columns, strict=True):
            self._kernels.multiply(hidden, part, part_output)
        return output


class Embedding:
    """Rows of a weight[num_ids, width]. `head` is the same copy as a linear layer, for models that tie the two."""

    def __init__(self, weight: PackedWeight, kernels: Kernels) -> None:
        self._weight = weight
        self._kernels = kernels
        self.head = Linear((weight,), kernels)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """int64[tokens] -> float32[tokens, width]."""
        output = torch.empty((ids.shape[0], self._weight.depth))
        self._kernels.gather_rows(self._weight, ids, output)
        return output
