"""The gated feed-forward network. Source: Shazeer 2020, "GLU variants improve transformer"."""

from __future__ import annotations

from collections.abc import Callable

import torch

from model_runtime.layer_builder import LayerBuilder


class GatedMlp:
    """down(f(gate) * up), the tensors named `{prefix}gate_proj.weight` and so on.

    `gate_multiply` is one of the kernels' operations from gate beside up to f(gate) * up; None stands for that of SiLU.
    """

    def __init__(
        self,
        prefix: str,
        builder: LayerBuilder,
        gate_multiply: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        self._gate_multiply = gate_multiply or builder.kernels.silu_multiply
        self._gate_up = builder.linear(
            prefix + "gate_proj.weight", prefix + "up_proj.weight"
        )  # [2 * intermediate, hidden]
        self._down = builder.linear(prefix + "down_proj.weight")  # [hidden, intermediate]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        gate_up = self._gate_up(hidden)  # [T, 2 * intermediate]
        gated = hidden.new_empty((hidden.shape[0], gate_up.shape[1] // 2))  # [T, intermediate]
        self._gate_multiply(gate_up, gated)
        return self._down(gated)  # [T, hidden]


def gated_mlp_shapes(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one network."""
    return {
        prefix + "gate_proj.weight": (intermediate, hidden),
        prefix + "up_proj.weight": (intermediate, hidden),
        prefix + "down_proj.weight": (hidden, intermediate),
    }
