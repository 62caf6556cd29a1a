"""The gated delta net: projections, a short convolution, the gated delta rule, and a gated norm.

Source: Yang, Kautz and Hatamizadeh 2024, "Gated delta networks"; tensor names and layouts of transformers' Qwen3-Next.
T is tokens of the forward.
"""

from __future__ import annotations

import torch

from model_runtime.config import ModelConfig
from model_runtime.errors import CheckpointError
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.delta_net import DeltaNetConfig
from model_runtime.layers.recurrence import CachedStates


def delta_net_of(config: ModelConfig) -> DeltaNetConfig:
    """Raises CheckpointError for a config without recurrent layers."""
    if config.delta_net is None:
        raise CheckpointError(f"{config.architecture}: the config names no recurrent layers")
    return config.delta_net


class DeltaNet:
    """One recurrent layer without its residual. `cached` declares what it keeps."""

    def __init__(self, layer: int, prefix: str, builder: LayerBuilder, config: DeltaNetConfig) -> None:
        self._config = config
        self._kernels = builder.kernels
        # [num_conv_channels + value_width + 2 * num_heads, hidden]
        self._projections = builder.linear_of(_stack_projections(prefix, builder, config))
        conv = builder.tensor(prefix + "conv1d.weight")  # [channels, 1, width]
        self._conv_weight = conv.squeeze(1).t().contiguous()  # [width, channels]
        self._step_bias = builder.tensor(prefix + "dt_bias").unsqueeze(1)  # [num_heads, 1]
        self._rate = builder.tensor(prefix + "A_log").exp()  # [num_heads]
        self._norm = builder.norm(prefix + "norm.weight")  # [value_head_dim]
        self._output = builder.linear(prefix + "out_proj.weight")  # [hidden, value_width]
        self.cached = CachedStates(layer)

    def __call__(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        config = self._config
        parts = [config.num_conv_channels, config.value_width, config.num_heads, config.num_heads]
        inputs, gate, strength_logits, step = torch.split(self._projections(hidden), parts, dim=1)
        mixed = self.cached.convolve(inputs, self._conv_weight, None, context)  # [T, num_conv_channels]
        query, key, value = torch.split(mixed, [config.key_width, config.key_width, config.value_width], dim=1)
        read = self.cached.delta_rule(
            query.view(-1, config.num_key_heads, config.key_head_dim),
            key.view(-1, config.num_key_heads, config.key_head_dim),
            value.view(-1, config.num_heads, config.value_head_dim),
            step.unsqueeze(2),
            self._step_bias,
            self._rate,
            strength_logits,
            context,
        )  # [T, num_heads, value_head_dim]
        return self._output(self._gated_norm(read, gate))

    def _gated_norm(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Every head on its own to unit mean square, times silu of its gate: [T, value_width]."""
        normed = self._norm(read.flatten(0, 1))  # [T * num_heads, value_head_dim]
        gated = torch.empty_like(normed)
        self._kernels.silu_multiply(torch.cat((gate.reshape(normed.shape), normed), dim=1), gated)
        return gated.view(gate.shape)


def delta_net_shapes(prefix: str, hidden: int, config: DeltaNetConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one layer."""
    return {
        prefix + "in_proj_qkvz.weight": (2 * config.key_width + 2 * config.value_width, hidden),
        prefix + "in_proj_ba.weight": (2 * config.num_heads, hidden),
        prefix + "conv1d.weight": (config.num_conv_channels, 1, config.conv_width),
        prefix + "dt_bias": (config.num_heads,),
        prefix + "A_log": (config.num_heads,),
        prefix + "norm.weight": (config.value_head_dim,),
        prefix + "out_proj.weight": (hidden, config.value_width),
    }


def _stack_projections(prefix: str, builder: LayerBuilder, config: DeltaNetConfig) -> torch.Tensor:
    """Rows in the order queries, keys, values, gates, strengths, steps, each by head.

    A file has them by key head: the key head's query and key, then the values and gates of its value heads; in a second
    matrix their strengths and steps.
    """
    hidden = builder.config.hidden_size
    group = config.num_heads // config.num_key_heads
    values = group * config.value_head_dim
    wide = builder.tensor(prefix + "in_proj_qkvz.weight").view(config.num_key_heads, -1, hidden)
    narrow = builder.tensor(prefix + "in_proj_ba.weight").view(config.num_key_heads, -1, hidden)
    parts = (
        *torch.split(wide, [config.key_head_dim, config.key_head_dim, values, values], dim=1),
        *torch.split(narrow, [group, group], dim=1),
    )
    return torch.cat([part.reshape(-1, hidden) for part in parts])
