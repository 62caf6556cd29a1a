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
from model_runtime.layers.rotary import Angles
from model_runtime.weights import Shape, TensorRows


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


def query_key_value_rows(prefix: str, builder: LayerBuilder) -> tuple[TensorRows, TensorRows, TensorRows]:
    """This rank's heads of the three projections: [(num_heads + 2 * num_kv_heads) * head_dim, hidden] together."""
    config = builder.config
    query, key_value = builder.heads(config.num_heads), builder.heads(config.num_kv_heads)
    return (
        TensorRows.of_heads(prefix + "q_proj.weight", query, config.head_dim),
        TensorRows.of_heads(prefix + "k_proj.weight", key_value, config.head_dim),
        TensorRows.of_heads(prefix + "v_proj.weight", key_value, config.head_dim),
    )


class GroupedQueryAttention:
    """Projections, rotation and attention of one layer, the tensors named `{prefix}q_proj.weight` and so on.

    The heads are those of this rank.
    """

    def __init__(self, layer: int, prefix: str, builder: LayerBuilder) -> None:
        config = builder.config
        self._head_dim = config.head_dim
        self._qkv = builder.linear(*query_key_value_rows(prefix, builder))
        self._output = builder.heads_output(prefix + "o_proj.weight")  # [hidden, num_heads * head_dim]
        self.cached = CachedAttention(layer, config, len(builder.heads(config.num_kv_heads)))

    def __call__(self, hidden: torch.Tensor, angles: Angles, context: ForwardContext) -> torch.Tensor:
        heads = self._qkv(hidden)  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
        heads = heads.view(hidden.shape[0], -1, self._head_dim)  # [T, num_heads + 2 * num_kv_heads, head_dim]
        attended = self.cached.turning(heads, angles, context)  # [T, num_heads, head_dim]
        return self._output(attended.flatten(1))  # [T, hidden]
