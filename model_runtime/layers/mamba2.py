"""One Mamba-2 layer: projection, short convolution, selective state space, gated norm.

Source: Dao and Gu 2024, "Transformers are SSMs"; tensor names of transformers' hybrids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from cache_runtime.recipes.partition import HeadSection
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.mamba2 import Mamba2Config
from model_runtime.layers.norm import RmsNorm
from model_runtime.layers.recurrence import CachedStates
from model_runtime.rank_group import gather_columns
from model_runtime.weights import Shape, TensorRows


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


def mamba2_conv_sections(config: Mamba2Config) -> tuple[HeadSection, HeadSection, HeadSection]:
    """The channels of the convolution: values, keys and queries, each by the heads that ranks share out."""
    shared = HeadSection(num_heads=config.num_groups, head_width=config.state_dim)
    return HeadSection(num_heads=config.num_heads, head_width=config.head_dim), shared, shared


def _channel_rows(
    name: str, builder: LayerBuilder, config: Mamba2Config, first_row: int = 0
) -> tuple[TensorRows, TensorRows, TensorRows]:
    """This rank's channels among those of all heads, which begin at `first_row`: values, keys, queries."""
    groups, num_shared = builder.heads(config.num_groups), config.num_groups * config.state_dim
    first_key = first_row + config.inner_size
    return (
        TensorRows.of_heads(name, builder.heads(config.num_heads), config.head_dim, first_row),
        TensorRows.of_heads(name, groups, config.state_dim, first_key),
        TensorRows.of_heads(name, groups, config.state_dim, first_key + num_shared),
    )


class Mamba2:
    """The heads of this rank; the tensors are named `{prefix}in_proj.weight` and so on.

    A norm is over all heads of a group, so they are gathered before it and not behind it.
    """

    def __init__(self, layer: int, prefix: str, builder: LayerBuilder, config: Mamba2Config) -> None:
        heads, groups = builder.heads(config.num_heads), builder.heads(config.num_groups)
        self._config = replace(config, num_heads=len(heads), num_groups=len(groups))
        self._kernels, self._ranks = builder.kernels, builder.ranks
        input_name, first_step = prefix + "in_proj.weight", config.inner_size + config.num_conv_channels
        self._input = builder.linear(  # [inner + channels + num_heads, hidden]
            TensorRows.of_heads(input_name, heads, config.head_dim),
            *_channel_rows(input_name, builder, config, config.inner_size),
            TensorRows.of_heads(input_name, heads, 1, first_step),
        )
        conv = builder.tensor(*_channel_rows(prefix + "conv1d.weight", builder, config))  # [channels, 1, width]
        self._conv_weight = conv.squeeze(1).T.contiguous()  # [width, channels]
        bias_rows = _channel_rows(prefix + "conv1d.bias", builder, config)
        self._conv_bias = builder.tensor(*bias_rows) if config.has_conv_bias else None  # [channels]
        step_bias, rate, skip = (
            builder.tensor(TensorRows.of_heads(prefix + name, heads, 1)) for name in ("dt_bias", "A_log", "D")
        )  # [num_heads]
        self._step_bias, self._rate, self._skip = step_bias.unsqueeze(1), rate.exp(), skip
        weights = builder.tensor(prefix + "norm.weight").chunk(config.num_groups)
        self._norms = tuple(RmsNorm(weight, builder.config.rms_norm_eps, builder.kernels) for weight in weights)
        self._output = builder.split_linear(prefix + "out_proj.weight")  # [hidden, inner]
        self.cached = CachedStates(layer)

    def __call__(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; the layer's states are read and written on the way."""
        config = self._config
        parts = [config.inner_size, config.num_conv_channels, config.num_heads]
        gate, channels, steps = torch.split(self._input(hidden), parts, dim=1)
        mixed = self.cached.convolve(channels, self._conv_weight, self._conv_bias, context)  # [T, channels]
        scanned = self._scan(mixed, steps, context)  # [T, inner of this rank]
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
        """All heads of all ranks. The gate goes first; every group of heads is a norm of its own."""
        gated = torch.empty_like(scanned)
        self._kernels.silu_multiply(torch.cat((gate, scanned), dim=1), gated)
        groups = gather_columns(gated, self._ranks).chunk(len(self._norms), dim=1)
        return torch.cat([norm(group) for norm, group in zip(self._norms, groups, strict=True)], dim=1)
