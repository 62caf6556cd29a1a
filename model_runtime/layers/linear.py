"""Linear layers without bias, and the token embedding, which may share its weight with one."""

from __future__ import annotations

import torch

from model_runtime.kernels.interface import Kernels


class Linear:
    """[rows, depth] -> [rows, columns] by a weight[columns, depth], which it holds only as the kernels' packed copy."""

    def __init__(self, weight: torch.Tensor, kernels: Kernels) -> None:
        self._num_columns, self._depth = weight.shape
        self._packed = kernels.pack(weight)
        self._kernels = kernels

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, depth] -> float32[rows, columns]."""
        output = hidden.new_empty((hidden.shape[0], self._num_columns))
        self._kernels.multiply(hidden, self._packed, output)
        return output

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32[len(ids), depth]: rows of the weight, so that a tied head and embedding are one copy."""
        output = torch.empty((ids.shape[0], self._depth))
        self._kernels.gather_rows(self._packed, ids, output)
        return output
