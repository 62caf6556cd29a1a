"""A linear layer that LoRA adapters change: the one place where they are applied.

The rows of a batch are grouped by adapter; those of none get what the plain layer gives, bit for bit, and a batch
without adapters costs one look at an empty tuple. What is added to a row depends on that row alone.

Source: Hu et al. 2021, "LoRA".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model_runtime.kernels.interface import Kernels, PackedWeight
from model_runtime.layers.linear import Linear
from model_runtime.lora.adapter_set import LayerChange
from model_runtime.lora.token_groups import RunningGroups


class AdaptedLinear(Linear):
    """`changes` by adapter. Its inputs are the tokens of the running forward, all of them and in their order."""

    def __init__(
        self,
        parts: tuple[PackedWeight, ...],
        kernels: Kernels,
        changes: Mapping[str, LayerChange],
        running: RunningGroups,
    ) -> None:
        super().__init__(parts, kernels)
        self._changes = changes
        self._running = running

    @property
    def weight(self) -> PackedWeight | None:
        return None if self._running.groups else super().weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[tokens, depth] -> float32[tokens, columns]. Raises ValueError for other rows than the forward's."""
        output = super().__call__(hidden)
        for group in self._running.groups:
            if hidden.shape[0] != self._running.num_tokens:
                raise ValueError(f"{hidden.shape[0]} rows given, the forward has {self._running.num_tokens} tokens")
            change = self._changes.get(group.adapter)
            if change is not None:
                self._add(change, hidden, group.tokens, output)
        return output

    def _add(
        self, change: LayerChange, hidden: torch.Tensor, tokens: torch.Tensor | None, output: torch.Tensor
    ) -> None:
        chosen = hidden if tokens is None else hidden.index_select(0, tokens)
        inner = torch.empty((chosen.shape[0], change.down.num_columns))
        self._kernels.multiply(chosen, change.down, inner)
        added = torch.empty((chosen.shape[0], change.up.num_columns))
        self._kernels.multiply(inner, change.up, added)
        if tokens is None:
            output.add_(added)
        else:
            output.index_add_(0, tokens, added)
