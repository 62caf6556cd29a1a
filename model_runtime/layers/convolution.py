"""The short causal convolution before a recurrence, whose state is the last inputs of each channel."""

from __future__ import annotations

import torch

from cache_runtime.layer_binding import StateLayer
from model_runtime.forward_context import ForwardContext
from model_runtime.kernels.interface import Kernels


class ShortConvolution:
    """SiLU of a depthwise convolution. `weight`: float32[channels, width], the newest token last."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels) -> None:
        self._weight = weight.T.contiguous()  # [width, channels]
        self._bias = bias
        self._kernels = kernels

    def __call__(self, input: torch.Tensor, layer: StateLayer, context: ForwardContext) -> torch.Tensor:
        """float32[T, channels] -> float32[T, channels]; the layer's states are read and written on the way."""
        blocks = context.routed.state_blocks(layer.group_id)
        output = torch.empty(input.shape)
        self._kernels.causal_conv(
            input,
            self._weight,
            self._bias,
            context.pools.state.conv_state(layer.layer),
            blocks.input_blocks,
            blocks.output_blocks,
            blocks.checkpoint_blocks,
            blocks.checkpoint_lengths,
            context.batch.lengths,
            output,
        )
        return output
