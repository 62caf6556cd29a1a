"""Kimi delta attention: the gated delta rule in which every channel of a key decays by itself.

Source: Kimi Team 2025, "Kimi Linear"; tensor names of transformers' KimiLinearForCausalLM. T is tokens of the forward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.delta_net import DeltaNetConfig
from model_runtime.layers.recurrence import CachedStates
from model_runtime.weights import Shape


def kimi_delta_shapes(prefix: str, hidden: int, config: DeltaNetConfig) -> Mapping[str, Shape]:
    """Shapes of the tensors of one layer."""
    width, head_dim = config.value_width, config.value_head_dim
    shapes: dict[str, Shape] = {}
    for name in "qkv":
        shapes[f"{prefix}{name}_proj.weight"] = (width, hidden)
        shapes[f"{prefix}{name}_conv1d.weight"] = (width, 1, config.conv_width)
    for gate in "fg":
        shapes[f"{prefix}{gate}_a_proj.weight"] = (head_dim, hidden)
        shapes[f"{prefix}{gate}_b_proj.weight"] = (width, head_dim)
    return shapes | {
        prefix + "b_proj.weight": (config.num_heads, hidden),
        prefix + "dt_bias": (width,),
        prefix + "A_log": (1, 1, config.num_heads, 1),
        prefix + "o_norm.weight": (head_dim,),
        prefix + "o_proj.weight": (hidden, width),
    }


class KimiDelta:
    """One recurrent layer without its residual. `cached` declares what it keeps."""

    def __init__(self, layer: int, prefix: str, builder: LayerBuilder, config: DeltaNetConfig) -> None:
        self._config, self._kernels = config, builder.kernels
        names = [f"{prefix}{name}_proj.weight" for name in ("q", "k", "v", "b", "f_a", "g_a")]
        # [3 * value_width + num_heads + 2 * head_dim, hidden]
        self._projections = builder.linear(*names)
        conv = torch.cat([builder.tensor(f"{prefix}{name}_conv1d.weight") for name in "qkv"])  # [channels, 1, width]
        self._conv_weight = conv.squeeze(1).T.contiguous()  # [width, channels]
        self._step = builder.linear(prefix + "f_b_proj.weight")  # [value_width, head_dim]
        self._step_bias = builder.tensor(prefix + "dt_bias").view(config.num_heads, -1)  # [num_heads, head_dim]
        self._rate = builder.tensor(prefix + "A_log").exp().flatten()  # [num_heads]
        self._gate = builder.linear(prefix + "g_b_proj.weight")  # [value_width, head_dim]
        self._norm = builder.norm(prefix + "o_norm.weight")  # [head_dim]
        self._output = builder.linear(prefix + "o_proj.weight")  # [hidden, value_width]
        self.cached = CachedStates(layer)

    def __call__(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        config = self._config
        parts = [config.num_conv_channels, config.num_heads, config.value_head_dim, config.value_head_dim]
        inputs, strength_logits, step, gate = torch.split(self._projections(hidden), parts, dim=1)
        heads = (-1, config.num_heads, config.value_head_dim)
        mixed = self.cached.convolve(inputs, self._conv_weight, None, context)  # [T, num_conv_channels]
        query, key, value = (part.view(heads) for part in torch.split(mixed, config.value_width, dim=1))
        read = self.cached.delta_rule(
            query, key, value, self._step(step).view(heads), self._step_bias, self._rate, strength_logits, context
        )  # [T, num_heads, head_dim]
        return self._output(self._gated_norm(read, self._gate(gate)))

    def _gated_norm(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Every head on its own to unit mean square, times the sigmoid of its gate: [T, value_width]."""
        normed = self._norm(read.flatten(0, 1)).view(gate.shape)  # [T, value_width]
        gated = torch.empty_like(normed)
        self._kernels.sigmoid_multiply(torch.cat((gate, normed), dim=1), gated)
        return gated
