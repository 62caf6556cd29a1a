"""LayerBuilder: from tensor names to the layers that every family is made of. Knows no family."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_runtime.config import ModelConfig
from model_runtime.kernels.interface import Kernels
from model_runtime.layers.linear import Embedding, Linear
from model_runtime.layers.norm import RmsNorm
from model_runtime.weights import TensorSource, pack_stacked, read_stacked


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBuilder:
    """What the layers of one model are built from: tensors of the source, on the kernels of the device."""

    config: ModelConfig
    source: TensorSource
    dtype: torch.dtype
    kernels: Kernels

    def tensor(self, name: str) -> torch.Tensor:
        return read_stacked(self.source, (name,), self.dtype)

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.tensor(name), self.config.rms_norm_eps, self.kernels)

    def linear(self, *names: str) -> Linear:
        """One layer whose output is that of the named matrices side by side."""
        return Linear(pack_stacked(self.source, names, self.dtype, self.kernels), self.kernels)

    def linear_of(self, weight: torch.Tensor) -> Linear:
        """One layer of a weight[columns, depth] that was read and changed."""
        return Linear((self.kernels.pack(weight.contiguous()),), self.kernels)

    def embedding(self, name: str) -> Embedding:
        (weight,) = pack_stacked(self.source, (name,), self.dtype, self.kernels)
        return Embedding(weight, self.kernels)
