"""LayerBuilder: from tensor names to the layers that every family is made of. Knows no family.

Of what tensor ranks share, a layer asks for its rank's heads; nothing else of those tensors is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from cache_runtime.recipes.partition import TensorRank
from model_runtime.config import ModelConfig
from model_runtime.kernels.interface import Kernels, PackedWeight
from model_runtime.layers.adapted_linear import AdaptedLinear
from model_runtime.layers.linear import Embedding, Linear
from model_runtime.layers.norm import RmsNorm
from model_runtime.layers.split_linear import HeadsOutput, SplitLinear
from model_runtime.lora.adapter_set import AdapterSet, ArrangeRows, stack_rows
from model_runtime.rank_group import RankGroup, SingleRank
from model_runtime.weights import TensorRows, TensorSource, all_rows, pack_stacked, read_stacked


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBuilder:
    """What the layers of one model are built from: tensors of the source, on the kernels of the device.

    `ranks` compute the heads of every layer together. `adapters` change linear layers of tensors of the source.
    """

    config: ModelConfig
    source: TensorSource
    dtype: torch.dtype
    kernels: Kernels
    ranks: RankGroup = field(default_factory=SingleRank)
    adapters: AdapterSet = field(default_factory=AdapterSet)

    def without_adapters(self) -> LayerBuilder:
        """For layers that are given other rows than the tokens of the forward: no adapter changes them."""
        return replace(self, adapters=AdapterSet())

    def heads(self, num_heads: int) -> range:
        """Which of a layer's heads this rank computes. Raises CacheConfigError when they do not share out."""
        return TensorRank(rank=self.ranks.rank, size=self.ranks.size).heads(num_heads)

    def tensor(self, *parts: str | TensorRows) -> torch.Tensor:
        """Tensors, or rows of them, under one another."""
        return read_stacked(self.source, self._rows(parts), self.dtype)

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.tensor(name), self.config.rms_norm_eps, self.kernels)

    def linear(self, *parts: str | TensorRows) -> Linear:
        """One layer whose output is that of the named matrices, or rows of them, side by side."""
        rows = self._rows(parts)
        return self._linear(pack_stacked(self.source, rows, self.dtype, self.kernels), rows, stack_rows)

    def linear_arranged(self, *parts: str | TensorRows, arrange: ArrangeRows) -> Linear:
        """One layer of the named matrices, or rows of them, in the order that `arrange` brings their rows into."""
        rows = self._rows(parts)
        weight = arrange([self.tensor(part) for part in rows])
        return self._linear((self.kernels.pack(weight.contiguous()),), rows, arrange)

    def split_linear(self, name: str) -> Linear | SplitLinear:
        """The layer of one matrix, each rank holding some of its rows; every rank has the whole output."""
        num_rows = self.source.shapes[name][0]
        rows = self.heads(num_rows)
        part = self.linear(TensorRows(name, rows.start, rows.stop))
        return part if self.ranks.size == 1 else SplitLinear(part, self.ranks)

    def heads_output(self, name: str) -> Linear | HeadsOutput:
        """The matrix behind the heads of a layer: takes those of this rank, returns what all of them together give."""
        whole = self.split_linear(name)
        return whole if isinstance(whole, Linear) else HeadsOutput(whole, self.ranks)

    def embedding(self, name: str) -> Embedding:
        (weight,) = pack_stacked(self.source, self._rows((name,)), self.dtype, self.kernels)
        return Embedding(weight, self.kernels)

    def _linear(self, packed: tuple[PackedWeight, ...], rows: tuple[TensorRows, ...], arrange: ArrangeRows) -> Linear:
        changes = self.adapters.take(rows, arrange, self.kernels)
        if not changes:
            return Linear(packed, self.kernels)
        return AdaptedLinear(packed, self.kernels, changes, self.adapters.running)

    def _rows(self, parts: tuple[str | TensorRows, ...]) -> tuple[TensorRows, ...]:
        return tuple(all_rows(self.source, part) if isinstance(part, str) else part for part in parts)
