"""Root-mean-square normalisation."""

from __future__ import annotations

import torch

from model_runtime.kernels.interface import Kernels


class RmsNorm:
    """[rows, width] scaled to unit mean square per row, times a weight[width]."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: Kernels) -> None:
        self._weight = weight
        self._eps = eps
        self._kernels = kernels

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, width] -> float32[rows, width]."""
        output = torch.empty_like(hidden)
        self._kernels.rms_norm(hidden, self._weight, self._eps, output)
        return output
