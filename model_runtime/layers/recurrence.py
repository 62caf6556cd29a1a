"""The cache side of a recurrent layer: every row continues from its snapshot and leaves one behind.

Reads and writes the arena through the mapping only: snapshots are addressed by the router's state blocks. T is tokens
of the forward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cache_runtime.layer_binding import StateLayer
from model_runtime.forward_context import ForwardContext


class StateRows(NamedTuple):
    """The five arrays int32[num_rows] that every kernel of states takes, in their order."""

    input_blocks: torch.Tensor
    output_blocks: torch.Tensor
    checkpoint_blocks: torch.Tensor
    checkpoint_lengths: torch.Tensor
    lengths: torch.Tensor


class CachedStates:
    """One layer's convolution and recurrence over snapshots. `declaration` is stamped with a cache group."""

    def __init__(self, layer: int) -> None:
        self.declaration = StateLayer(layer=layer)

    def convolve(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, context: ForwardContext
    ) -> torch.Tensor:
        """silu of the causal convolution of [T, channels] by a weight[width, channels] -> [T, channels]."""
        states = context.pools.state.conv_state(self.declaration.layer)  # [num_blocks, width - 1, channels]
        output = torch.empty(inputs.shape)
        context.kernels.causal_conv(inputs, weight, bias, states, *self.rows(context), output)
        return output

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: torch.Tensor,
        step_bias: torch.Tensor,
        rate: torch.Tensor,
        strength_logits: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        """What the queries read, [T, num_heads, value_dim]; arguments as of `Kernels.gated_delta_rule`.

        Runs after the convolution of its layer: both states are in the arena when it says so.
        """
        layer = self.declaration.layer
        states = context.pools.state.recurrent_state(layer)  # [num_blocks, num_heads, key_dim, value_dim]
        output = torch.empty(value.shape)
        context.kernels.gated_delta_rule(
            query, key, value, step, step_bias, rate, strength_logits, states, *self.rows(context), output
        )
        context.on_stored(layer)
        return output

    def scan(
        self,
        value: torch.Tensor,
        key: torch.Tensor,
        query: torch.Tensor,
        step: torch.Tensor,
        step_bias: torch.Tensor,
        rate: torch.Tensor,
        skip: torch.Tensor,
        step_bounds: tuple[float, float],
        context: ForwardContext,
    ) -> torch.Tensor:
        """What the queries read, [T, num_heads, value_dim]; arguments as of `Kernels.selective_scan`.

        Runs after the convolution of its layer: both states are in the arena when it says so.
        """
        layer = self.declaration.layer
        states = context.pools.state.recurrent_state(layer)  # [num_blocks, num_heads, key_dim, value_dim]
        output = torch.empty(value.shape)
        context.kernels.selective_scan(
            value, key, query, step, step_bias, rate, skip, *step_bounds, states, *self.rows(context), output
        )
        context.on_stored(layer)
        return output

    def rows(self, context: ForwardContext) -> StateRows:
        """Which snapshots the rows of the forward read and write in this layer's group."""
        blocks = context.routed.state_blocks(self.declaration.group_id)
        return StateRows(
            input_blocks=blocks.input_blocks,
            output_blocks=blocks.output_blocks,
            checkpoint_blocks=blocks.checkpoint_blocks,
            checkpoint_lengths=blocks.checkpoint_lengths,
            lengths=context.batch.lengths,
        )
