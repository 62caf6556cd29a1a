"""Kernels in plain torch operations on any device torch knows: what computes where there are no native kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model_runtime.kernels.interface import PackedWeight
from model_runtime.kernels.reference import PlainWeight, ReferenceKernels, plain_rows


class TorchKernels(ReferenceKernels):
    """The reference's formulas with products in float32 by torch's own matrix routines.

    Those choose their order of summation by the shape of a batch: a request's logits may differ in the last bits with
    what shares its batch. Weights are kept in float32, whatever the file has.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @property
    def quantizations(self) -> Sequence[str]:
        return ()

    def pack(self, weight: torch.Tensor) -> PlainWeight:
        return super().pack(weight.to(self._device))

    def store_rows(self, rows: torch.Tensor, locations: torch.Tensor, buffer: torch.Tensor) -> None:
        buffer.index_copy_(0, locations, rows)  # which checks the locations where they are

    def multiply(self, input: torch.Tensor, weight: PackedWeight, output: torch.Tensor) -> None:
        output.copy_(input @ plain_rows(weight).T)
