"""The gated delta net: projections, a short convolution, the gated delta rule, and a gated norm.

Source: Yang, Kautz and Hatamizadeh 2024, "Gated delta networks"; tensor names and layouts of transformers' Qwen3-Next.
T is tokens of the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cache_runtime.recipes.partition import HeadSection
from model_runtime.config import ModelConfig
from model_runtime.errors import CheckpointError
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.delta_net import DeltaNetConfig
from model_runtime.layers.recurrence import CachedStates
from model_runtime.weights import TensorRows


def delta_net_of(config: ModelConfig) -> DeltaNetConfig:
    """Raises CheckpointError for a config without recurrent layers."""
    if config.delta_net is None:
        raise CheckpointError(f"{config.architecture}: the config names no recurrent layers")
    return config.delta_net


def delta_net_heads(config: DeltaNetConfig, builder: LayerBuilder) -> tuple[range, range]:
    """The value heads and the key heads of this rank."""
    return builder.heads(config.num_heads), builder.heads(config.num_key_heads)


def delta_net_conv_sections(config: DeltaNetConfig) -> tuple[HeadSection, HeadSection, HeadSection]:
    """The channels of the convolution: queries, keys and values, each by the heads that ranks share out."""
    shared = HeadSection(num_heads=config.num_key_heads, head_width=config.key_head_dim)
    return shared, shared, HeadSection(num_heads=config.num_heads, head_width=config.value_head_dim)


def conv_rows(name: str, config: DeltaNetConfig, builder: LayerBuilder) -> tuple[TensorRows, TensorRows, TensorRows]:
    """This rank's channels of a convolution over the queries, keys and values of all heads."""
    heads, key_heads = delta_net_heads(config, builder)
    return (
        TensorRows.of_heads(name, key_heads, config.key_head_dim),
        TensorRows.of_heads(name, key_heads, config.key_head_dim, config.key_width),
        TensorRows.of_heads(name, heads, config.value_head_dim, 2 * config.key_width),
    )


class DeltaNet:
    """One recurrent layer without its residual, this rank's heads. `cached` declares what it keeps."""

    def __init__(self, layer: int, prefix: str, builder: LayerBuilder, config: DeltaNetConfig) -> None:
        heads, key_heads = delta_net_heads(config, builder)
        self._config = replace(config, num_heads=len(heads), num_key_heads=len(key_heads))
        self._kernels = builder.kernels
        # [num_conv_channels + value_width + 2 * num_heads, hidden]
        group = config.num_heads // config.num_key_heads
        wide_rows = 2 * (config.key_head_dim + group * config.value_head_dim)
        self._projections = builder.linear_arranged(
            TensorRows.of_heads(prefix + "in_proj_qkvz.weight", key_heads, wide_rows),
            TensorRows.of_heads(prefix + "in_proj_ba.weight", key_heads, 2 * group),
            arrange=lambda parts: _by_kind(parts, config, heads, key_heads),
        )
        conv = builder.tensor(*conv_rows(prefix + "conv1d.weight", config, builder))  # [channels, 1, width]
        self._conv_weight = conv.squeeze(1).t().contiguous()  # [width, channels]
        self._step_bias = builder.tensor(TensorRows.of_heads(prefix + "dt_bias", heads, 1)).unsqueeze(1)
        self._rate = builder.tensor(TensorRows.of_heads(prefix + "A_log", heads, 1)).exp()  # [num_heads]
        self._norm = builder.norm(prefix + "norm.weight")  # [value_head_dim]
        self._output = builder.heads_output(prefix + "out_proj.weight")  # [hidden, value_width]
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


def _by_kind(parts: Sequence[torch.Tensor], config: DeltaNetConfig, heads: range, key_heads: range) -> torch.Tensor:
    """Rows in the order queries, keys, values, gates, strengths, steps, each by head.

    A file has them by key head: the key head's query and key, then the values and gates of its value heads; in a second
    matrix their strengths and steps. These are the rows of `key_heads`, of whose value heads `heads` are wanted.
    """
    wide, narrow = parts
    width = wide.shape[1]
    group = config.num_heads // config.num_key_heads
    values = group * config.value_head_dim
    query, key, value, gate = torch.split(
        wide.view(len(key_heads), -1, width), [config.key_head_dim, config.key_head_dim, values, values], dim=1
    )
    by_head = (value, gate, *torch.split(narrow.view(len(key_heads), -1, width), [group, group], dim=1))
    # Ranks that share a key head have some of its value heads each.
    first = heads.start - key_heads.start * group
    mine = (part.reshape(len(key_heads) * group, -1, width)[first : first + len(heads)] for part in by_head)
    return torch.cat([part.reshape(-1, width) for part in (query, key, *mine)])
