"""Convolution and recurrences of states in plain torch operations and float64: the oracle of the native kernels.

Token by token, as the formulas stand; see `Kernels` for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import silu, softplus

UNIT_LENGTH_EPS = 1e-6


def run_rows(
    states: torch.Tensor,
    input_blocks: torch.Tensor,
    output_blocks: torch.Tensor,
    checkpoint_blocks: torch.Tensor,
    checkpoint_lengths: torch.Tensor,
    lengths: torch.Tensor,
    step: Callable[[int, torch.Tensor], torch.Tensor],
) -> None:
    """`step(token, state)` gives the state after a token; every row's snapshots are read and written around it."""
    starts = [
        torch.zeros_like(states[0], dtype=torch.float64) if block < 0 else states[block].double()
        for block in input_blocks.tolist()
    ]
    token = 0
    columns = (output_blocks, checkpoint_blocks, checkpoint_lengths, lengths)
    for state, *row in zip(starts, *(column.tolist() for column in columns), strict=True):
        output_block, checkpoint_block, checkpoint_length, length = row
        for done in range(1, length + 1):
            state = step(token, state)
            token += 1
            if checkpoint_block >= 0 and done == checkpoint_length:
                states[checkpoint_block] = state
        states[output_block] = state


def conv_step(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """A state is the inputs before the token, [width - 1, channels]."""

    def step(token: int, state: torch.Tensor) -> torch.Tensor:
        window = torch.cat((state, input[token : token + 1].double()))
        total = (window * weight).sum(0)
        output[token] = silu(total if bias is None else total + bias)
        return window[1:]

    return step


def to_length(heads: torch.Tensor, length: float) -> torch.Tensor:
    """Every head's vector brought to the length."""
    heads = heads.double()
    return heads * length * torch.rsqrt(heads.square().sum(-1, keepdim=True) + UNIT_LENGTH_EPS)


def delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    output: torch.Tensor,
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """A state is [num_heads, key_dim, value_dim], `decay` [num_tokens, num_heads, key_dim or 1]."""
    group = value.shape[1] // key.shape[1]
    key = to_length(key, 1.0).repeat_interleave(group, dim=1)
    query = to_length(query, query.shape[-1] ** -0.5).repeat_interleave(group, dim=1)

    def step(token: int, state: torch.Tensor) -> torch.Tensor:
        state = state * decay[token].unsqueeze(-1)
        recalled = torch.einsum("hk,hkv->hv", key[token], state)
        written = strength[token].unsqueeze(-1) * (value[token] - recalled)
        state = state + key[token].unsqueeze(-1) * written.unsqueeze(-2)
        output[token] = torch.einsum("hk,hkv->hv", query[token], state)
        return state

    return step


def scan_step(
    value: torch.Tensor,
    key: torch.Tensor,
    query: torch.Tensor,
    dt: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    output: torch.Tensor,
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """A state is [num_heads, key_dim, value_dim], `dt` float64[num_tokens, num_heads]."""
    group = value.shape[1] // key.shape[1]
    key, query = (heads.double().repeat_interleave(group, dim=1) for heads in (key, query))

    def step(token: int, state: torch.Tensor) -> torch.Tensor:
        written = dt[token].unsqueeze(-1) * value[token]
        kept = state * torch.exp(-rate * dt[token])[:, None, None]
        state = kept + key[token].unsqueeze(-1) * written.unsqueeze(-2)
        output[token] = torch.einsum("hk,hkv->hv", query[token], state) + skip.unsqueeze(-1) * value[token]
        return state

    return step


def decay_of(step: torch.Tensor, step_bias: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """float64, shaped like `step`."""
    return torch.exp(-rate[:, None] * softplus(step.double() + step_bias))
