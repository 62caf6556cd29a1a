"""Kimi delta attention: the gated delta rule in which every channel of a key decays by itself.

Source: Kimi Team 2025, "Kimi Linear"; tensor names of transformers' KimiLinearForCausalLM. T is tokens of the forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.delta_net import DeltaNetConfig
from model_runtime.layers.recurrence import CachedStates
from model_runtime.weights import Shape, TensorRows


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
    """One recurrent layer without its residual, this rank's heads. `cached` declares what it keeps."""

    def __init__(self, layer: int, prefix: str, builder: LayerBuilder, config: DeltaNetConfig) -> None:
        heads, head_dim = builder.heads(config.num_heads), config.value_head_dim
        self._config, self._kernels = replace(config, num_heads=len(heads), num_key_heads=len(heads)), builder.kernels

        def rows_of(name: str) -> TensorRows:
            return TensorRows.of_heads(prefix + name, heads, head_dim)

        # [3 * value_width + num_heads + 2 * head_dim, hidden]
        self._projections = builder.linear(
            *(rows_of(f"{name}_proj.weight") for name in "qkv"),
            TensorRows.of_heads(prefix + "b_proj.weight", heads, 1),
            *(f"{prefix}{name}_a_proj.weight" for name in "fg"),
        )
        conv = builder.tensor(*(rows_of(f"{name}_conv1d.weight") for name in "qkv"))  # [channels, 1, width]
        self._conv_weight = conv.squeeze(1).T.contiguous()  # [width, channels]
        self._step = builder.linear(rows_of("f_b_proj.weight"))  # [value_width, head_dim]
        self._step_bias = builder.tensor(rows_of("dt_bias")).view(len(heads), -1)  # [num_heads, head_dim]
        self._rate = builder.tensor(prefix + "A_log").exp().flatten()[heads.start : heads.stop]  # [num_heads]
        self._gate = builder.linear(rows_of("g_b_proj.weight"))  # [value_width, head_dim]
        self._norm = builder.norm(prefix + "o_norm.weight")  # [head_dim]
        self._output = builder.heads_output(prefix + "o_proj.weight")  # [hidden, value_width]
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
