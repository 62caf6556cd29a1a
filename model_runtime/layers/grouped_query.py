"""Grouped-query attention with rotary positions: query, key and value projections are one product.

Source: Ainslie et al. 2023, "GQA".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model_runtime.config import ModelConfig
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layers.attention import CachedAttention
from model_runtime.layers.rotary import Angles, rotate
from model_runtime.weights import Shape


def grouped_query_shapes(prefix: str, config: ModelConfig) -> Mapping[str, Shape]:
    """Shapes of the tensors of one layer."""
    hidden = config.hidden_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        prefix + "q_proj.weight": (query, hidden),
        prefix + "k_proj.weight": (key_value, hidden),
        prefix + "v_proj.weight": (key_value, hidden),
        prefix + "o_proj.weight": (hidden, query),
    }


class GroupedQueryAttention:
    """Projections, rotation and attention of one layer, the tensors named `{prefix}q_proj.weight` and so on."""

    def __init__(self, layer: int, prefix: str, builder: LayerBuilder) -> None:
        config = builder.config
        self._kernels = builder.kernels
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._qkv = builder.linear(
            *(f"{prefix}{name}_proj.weight" for name in "qkv")
        )  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
        self._output = builder.linear(prefix + "o_proj.weight")  # [hidden, num_heads * head_dim]
        self.cached = CachedAttention(layer, config)

    def __call__(self, hidden: torch.Tensor, angles: Angles, context: ForwardContext) -> torch.Tensor:
        num_rotated = self._num_heads + self._num_kv_heads
        heads = self._qkv(hidden)  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
        heads = heads.view(hidden.shape[0], -1, self._head_dim)  # [T, num_heads + 2 * num_kv_heads, head_dim]
        rotated = rotate(heads[:, :num_rotated], angles, self._kernels)  # [T, num_heads + num_kv_heads, head_dim]
        attended = self.cached(
            rotated[:, : self._num_heads], rotated[:, self._num_heads :], heads[:, num_rotated:], context
        )  # [T, num_heads, head_dim]
        return self._output(attended.flatten(1))  # [T, hidden]
