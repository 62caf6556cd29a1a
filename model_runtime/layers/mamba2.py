"""One Mamba-2 layer: projection, short convolution, selective state space, gated norm.

Source: Dao and Gu 2024, "Transformers are SSMs"; tensor names of transformers' hybrids.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.mamba2 import Mamba2Config
from model_runtime.layers.norm import RmsNorm
from model_runtime.layers.recurrence import CachedStates
from model_runtime.weights import Shape


def mamba2_shapes(prefix: str, hidden: int, config: Mamba2Config) -> Mapping[str, Shape]:
    """Shapes of the tensors of one layer."""
    channels, inner = config.num_conv_channels, config.inner_size
    shapes: dict[str, Shape] = {
        prefix + "in_proj.weight": (inner + channels + config.num_heads, hidden),
        prefix + "conv1d.weight": (channels, 1, config.conv_width),
        prefix + "dt_bias": (config.num_heads,),
        prefix + "A_log": (config.num_heads,),
        prefix + "D": (config.num_heads,),
        prefix + "norm.weight": (inner,),
        prefix + "out_proj.weight": (hidden, inner),
    }
    return shapes | {prefix + "conv1d.bias": (channels,)} if config.has_conv_bias else shapes


class Mamba2:
    """The tensors are named `{prefix}in_proj.weight` and so on."""

    def __init__(self, layer: int, prefix: str, builder: LayerBuilder, config: Mamba2Config) -> None:
        self._config, self._kernels = config, builder.kernels
        self._input = builder.linear(prefix + "in_proj.weight")  # [inner + channels + num_heads, hidden]
        self._conv_weight = builder.tensor(prefix + "conv1d.weight").squeeze(1).T.contiguous()  # [width, channels]
        self._conv_bias = builder.tensor(prefix + "conv1d.bias") if config.has_conv_bias else None  # [channels]
        self._step_bias = builder.tensor(prefix + "dt_bias").unsqueeze(1)  # [num_heads, 1]
        self._rate = builder.tensor(prefix + "A_log").exp()  # [num_heads]
        self._skip = builder.tensor(prefix + "D")  # [num_heads]
        weights = builder.tensor(prefix + "norm.weight").chunk(config.num_groups)
        self._norms = tuple(RmsNorm(weight, builder.config.rms_norm_eps, builder.kernels) for weight in weights)
        self._output = builder.linear(prefix + "out_proj.weight")  # [hidden, inner]
        self.cached = CachedStates(layer)

    def __call__(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; the layer's states are read and written on the way."""
        config = self._config
        parts = [config.inner_size, config.num_conv_channels, config.num_heads]
        gate, channels, steps = torch.split(self._input(hidden), parts, dim=1)
        mixed = self.cached.convolve(channels, self._conv_weight, self._conv_bias, context)  # [T, channels]
        scanned = self._scan(mixed, steps, context)  # [T, inner]
        return self._output(self._gated(scanned, gate))  # [T, hidden]

    def _scan(self, channels: torch.Tensor, steps: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        config = self._config
        num_shared = config.num_groups * config.state_dim
        values, keys, queries = torch.split(channels, [config.inner_size, num_shared, num_shared], dim=1)
        scanned = self.cached.scan(
            values.view(-1, config.num_heads, config.head_dim),
            keys.view(-1, config.num_groups, config.state_dim),
            queries.view(-1, config.num_groups, config.state_dim),
            steps.unsqueeze(2),
            self._step_bias,
            self._rate,
            self._skip,
            (config.min_step, config.max_step),
            context,
        )  # [T, num_heads, head_dim]
        return scanned.flatten(1)

    def _gated(self, scanned: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The gate goes first; every group of heads is a norm of its own."""
        gated = torch.empty_like(scanned)
        self._kernels.silu_multiply(torch.cat((gate, scanned), dim=1), gated)
        groups = gated.chunk(self._config.num_groups, dim=1)
        return torch.cat([norm(group) for norm, group in zip(self._norms, groups, strict=True)], dim=1)
