"""Multi-head latent attention in its absorbed form: heads attend over the compressed rows themselves.

A key is W_k c and a score q . W_k c = (W_k^T q) . c, so the query is brought to the space of the rows instead of every
row to the heads; likewise the values, W_v applied to the weighted sum of rows. All heads then share one row per token,
which is key and value at once. Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cache_runtime.layer_binding import PagedAttention
from model_runtime.config import ModelConfig
from model_runtime.forward_context import ForwardContext
from model_runtime.kernels.interface import Kernels, PackedWeight
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.latent_attention import LatentAttentionConfig
from model_runtime.layers.cached_rows import attend_rows, store_rows
from model_runtime.layers.norm import RmsNorm
from model_runtime.layers.rotary import Angles, rotate
from model_runtime.layers.sparse_index import SparseIndex
from model_runtime.weights import Shape, TensorRows

_LATENT_NORM_EPS = 1e-6  # of the compressed rows and queries, whatever the model's other norms have


def declare_latent_attention(layer: int) -> PagedAttention:
    """What the layer tells the cache of itself; known before any weight is read."""
    return PagedAttention(layer=layer, field_name="latent")


def latent_of(config: ModelConfig) -> LatentAttentionConfig:
    """Raises ValueError for a model without latent attention."""
    if config.latent_attention is None:
        raise ValueError(f"{config.architecture}: the config has no latent_attention")
    return config.latent_attention


def latent_attention_shapes(prefix: str, config: ModelConfig) -> Mapping[str, Shape]:
    """Shapes of the tensors of one layer."""
    latent, hidden, num_heads = latent_of(config), config.hidden_size, config.num_heads
    shapes: dict[str, Shape] = {
        prefix + "kv_a_proj_with_mqa.weight": (latent.row_width, hidden),
        prefix + "kv_a_layernorm.weight": (latent.rank,),
        prefix + "kv_b_proj.weight": (num_heads * (latent.nope_head_dim + latent.value_head_dim), latent.rank),
        prefix + "o_proj.weight": (hidden, num_heads * latent.value_head_dim),
    }
    if latent.query_rank is None:
        return shapes | {prefix + "q_proj.weight": (num_heads * latent.query_head_dim, hidden)}
    return shapes | {
        prefix + "q_a_proj.weight": (latent.query_rank, hidden),
        prefix + "q_a_layernorm.weight": (latent.query_rank,),
        prefix + "q_b_proj.weight": (num_heads * latent.query_head_dim, latent.query_rank),
    }


class LatentAttention:
    """Projections, rotation and attention of one layer, the tensors named `{prefix}kv_b_proj.weight` and so on.

    The heads are those of this rank; compressed rows are the same on all ranks. With an `index` a token attends to the
    rows that it chooses.
    """

    def __init__(self, layer: int, prefix: str, builder: LayerBuilder, index: SparseIndex | None = None) -> None:
        config, latent = builder.config, latent_of(builder.config)
        heads = builder.heads(config.num_heads)
        self._index = index
        self._latent, self._num_heads, self._kernels = latent, len(heads), builder.kernels
        self._scale = latent.query_head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self._compress_query = None if latent.query_rank is None else builder.linear(prefix + "q_a_proj.weight")
        self._query_norm = None if latent.query_rank is None else _norm(prefix + "q_a_layernorm.weight", builder)
        query_name = prefix + ("q_proj.weight" if latent.query_rank is None else "q_b_proj.weight")
        self._query = builder.linear_arranged(  # [num_heads * query_head_dim, depth]
            TensorRows.of_heads(query_name, heads, latent.query_head_dim),
            arrange=lambda parts: _heads_turning_apart(parts[0], latent),
        )
        self._compress = builder.linear_arranged(  # [row_width, hidden]
            prefix + "kv_a_proj_with_mqa.weight", arrange=lambda parts: _turning_apart(parts[0], latent)
        )
        self._row_norm = _norm(prefix + "kv_a_layernorm.weight", builder)  # [rank]
        expansion = TensorRows.of_heads(
            prefix + "kv_b_proj.weight", heads, latent.nope_head_dim + latent.value_head_dim
        )
        self._expand = _Expansion(builder.tensor(expansion), latent, self._num_heads, self._kernels)
        self._output = builder.heads_output(prefix + "o_proj.weight")  # [hidden, num_heads * value_head_dim]
        self.declaration = declare_latent_attention(layer)

    def __call__(self, hidden: torch.Tensor, angles: Angles | None, context: ForwardContext) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. `angles` None: nothing turns."""
        self._store(hidden, angles, context)
        compressed = self._compressed_query(hidden)
        absorbed = self._absorbed(self._query(compressed).view(hidden.shape[0], self._num_heads, -1), angles)
        if self._index is None or angles is None:
            attended = self._attend(absorbed, context)  # [T, num_heads, row_width]
        else:
            selected = self._index.select(hidden, compressed, angles, context)  # [T, num_selected]
            attended = self._attend_to(selected, absorbed, context)
        values = self._expand.to_values(attended)  # [T, num_heads, value_head_dim]
        return self._output(values.flatten(1))  # [T, hidden]

    def _compressed_query(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._compress_query is None or self._query_norm is None:
            return hidden
        return self._query_norm(self._compress_query(hidden))  # [T, query_rank]

    def _store(self, hidden: torch.Tensor, angles: Angles | None, context: ForwardContext) -> None:
        """Leaves the tokens' rows in the cache."""
        rank = self._latent.rank
        rows = self._compress(hidden)  # [T, row_width]
        turned = _turned(rows[:, rank:].unsqueeze(1), angles, self._kernels).squeeze(1)  # [T, rope_head_dim]
        rows = torch.cat((self._row_norm(rows[:, :rank]), turned), dim=1)
        layer, group_id = self.declaration.layer, self.declaration.group_id
        store_rows(context.pools.latent.rows(layer), rows, group_id, context)
        if self._index is not None and angles is not None:
            self._index.store(hidden, angles, context)
        context.on_stored(layer)

    def _absorbed(self, query: torch.Tensor, angles: Angles | None) -> torch.Tensor:
        """Queries [T, num_heads, query_head_dim] in the space of the rows, [T, num_heads, row_width]."""
        latent = self._latent
        absorbed = query.new_empty((query.shape[0], self._num_heads, latent.row_width))
        self._expand.absorb(query[..., : latent.nope_head_dim], absorbed[..., : latent.rank])
        absorbed[..., latent.rank :] = _turned(query[..., latent.nope_head_dim :], angles, self._kernels)
        return absorbed

    def _attend(self, query: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        layer, group_id = self.declaration.layer, self.declaration.group_id
        page_tokens = context.routed.kernel_page_size(group_id)
        pages = context.pools.latent.rows(layer).view(-1, page_tokens, 1, self._latent.row_width)
        return attend_rows(query, pages, pages, group_id, self._scale, None, context)

    def _attend_to(self, selected: torch.Tensor, query: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Attention to chosen positions: for the kernel every token is a row of its own, its pages single rows."""
        layer, group_id = self.declaration.layer, self.declaration.group_id
        rows = context.pools.latent.rows(layer).view(-1, 1, 1, self._latent.row_width)
        num_chosen = (selected >= 0).sum(1, dtype=torch.int32)
        output = torch.empty_like(query)
        context.kernels.attend(
            query,
            rows,
            rows,
            _rows_of(selected, context, group_id),
            num_chosen - 1,
            torch.ones_like(num_chosen),
            output,
            self._scale,
        )
        return output


def _rows_of(selected: torch.Tensor, context: ForwardContext, group_id: str) -> torch.Tensor:
    """int32[T, num_selected] rows of the group's flattened buffers, 0 (in the null block) where nothing is selected."""
    page_tokens = context.routed.kernel_page_size(group_id)
    batch_rows = torch.repeat_interleave(torch.arange(context.batch.lengths.shape[0]), context.batch.lengths)
    tables = context.routed.page_table(group_id)[batch_rows]  # [T, max_pages]
    positions = selected.clamp(min=0)
    pages = tables.gather(1, (positions // page_tokens).long())
    return torch.where(selected >= 0, pages * page_tokens + positions % page_tokens, 0).int()


class _Expansion:
    """The two halves of kv_b_proj by head: what makes keys of rows, and what makes values of them."""

    def __init__(self, weight: torch.Tensor, latent: LatentAttentionConfig, num_heads: int, kernels: Kernels) -> None:
        self._kernels = kernels
        self._rank, self._value_head_dim = latent.rank, latent.value_head_dim
        heads = weight.view(num_heads, -1, latent.rank)  # [num_heads, nope_head_dim + value_head_dim, rank]
        self._keys = _packed_heads(heads[:, : latent.nope_head_dim].transpose(1, 2), kernels)
        self._values = _packed_heads(heads[:, latent.nope_head_dim :], kernels)

    def absorb(self, query: torch.Tensor, output: torch.Tensor) -> None:
        """[T, num_heads, nope_head_dim] -> `output` [T, num_heads, rank]."""
        for head, weight in enumerate(self._keys):
            self._kernels.multiply(query[:, head], weight, output[:, head])

    def to_values(self, attended: torch.Tensor) -> torch.Tensor:
        """[T, num_heads, row_width] -> [T, num_heads, value_head_dim]."""
        values = attended.new_empty((*attended.shape[:2], self._value_head_dim))
        for head, weight in enumerate(self._values):
            self._kernels.multiply(attended[:, head, : self._rank], weight, values[:, head])
        return values


def _packed_heads(heads: torch.Tensor, kernels: Kernels) -> tuple[PackedWeight, ...]:
    return tuple(kernels.pack(head.contiguous()) for head in heads)


def _norm(name: str, builder: LayerBuilder) -> RmsNorm:
    return RmsNorm(builder.tensor(name), _LATENT_NORM_EPS, builder.kernels)


def _turning_apart(rows: torch.Tensor, latent: LatentAttentionConfig) -> torch.Tensor:
    """Weight rows whose last `rope_head_dim` (of the axis before the last) are brought into the half-split layout."""
    if not (latent.is_interleaved and latent.is_rotary):
        return rows
    still, turning = torch.split(rows, [rows.shape[-2] - latent.rope_head_dim, latent.rope_head_dim], dim=-2)
    return torch.cat((still, turning[..., 0::2, :], turning[..., 1::2, :]), dim=-2)


def _heads_turning_apart(rows: torch.Tensor, latent: LatentAttentionConfig) -> torch.Tensor:
    """The same for each head of [num_heads * query_head_dim, width]."""
    return _turning_apart(rows.view(-1, latent.query_head_dim, rows.shape[1]), latent).flatten(0, 1)


def _turned(heads: torch.Tensor, angles: Angles | None, kernels: Kernels) -> torch.Tensor:
    return heads if angles is None else rotate(heads, angles, kernels)
