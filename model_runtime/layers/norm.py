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

    def of_sum(self, addend: torch.Tensor, total: torch.Tensor, output: torch.Tensor) -> None:
        """Adds `addend` to `total` and writes to `output` what the sums give; float32[rows, width] each."""
        self._kernels.add_rms_norm(addend, total, self._weight, self._eps, output)
