"""Linear layers without bias."""

from __future__ import annotations

import torch

from model_runtime.kernels.interface import Kernels


class Linear:
    """[rows, depth] -> [rows, columns] by a weight[columns, depth] and the device's kernel."""

    def __init__(self, weight: torch.Tensor, kernels: Kernels) -> None:
        self._weight = weight
        self._kernels = kernels

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, depth] -> float32[rows, columns]."""
        output = hidden.new_empty((hidden.shape[0], self._weight.shape[0]))
        self._kernels.multiply(hidden, self._weight, output)
        return output
