"""The gated feed-forward network. Source: Shazeer 2020, "GLU variants improve transformer"."""

from __future__ import annotations

from enum import Enum, auto, unique

import torch

from model_runtime.layer_builder import LayerBuilder


@unique
class Gate(Enum):
    """The function of a network's gate."""

    SILU = auto()
    GELU_TANH = auto()


class GatedMlp:
    """down(f(gate) * up), the tensors named `{prefix}gate_proj.weight` and so on."""

    def __init__(self, prefix: str, builder: LayerBuilder, gate: Gate = Gate.SILU) -> None:
        kernels, is_silu = builder.kernels, gate is Gate.SILU
        self._network = kernels.silu_network if is_silu else kernels.gelu_tanh_network
        self._gate_multiply = kernels.silu_multiply if is_silu else kernels.gelu_tanh_multiply
        self._gate = builder.linear(prefix + "gate_proj.weight")  # [intermediate, hidden]
        self._up = builder.linear(prefix + "up_proj.weight")  # [intermediate, hidden]
        self._down = builder.linear(prefix + "down_proj.weight")  # [hidden, intermediate]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up, down = self._gate.weight, self._up.weight, self._down.weight
        if gate is None or up is None or down is None:
            return self._by_layers(hidden)
        output = torch.empty(hidden.shape)
        self._network(hidden, gate, up, down, output)
        return output

    def _by_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same where adapters change a layer."""
        gate_up = torch.cat((self._gate(hidden), self._up(hidden)), dim=1)  # [T, 2 * intermediate]
        gated = torch.empty((hidden.shape[0], self._gate.num_columns))  # [T, intermediate]
        self._gate_multiply(gate_up, gated)
        return self._down(gated)


def gated_mlp_shapes(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one network."""
    return {
        prefix + "gate_proj.weight": (intermediate, hidden),
        prefix + "up_proj.weight": (intermediate, hidden),
        prefix + "down_proj.weight": (hidden, intermediate),
    }
