"""The Gemma 3 family, text only: sliding and full attention in turns, and a norm on both sides of every block.

Source: Gemma Team 2025, "Gemma 3 technical report"; tensor names and numerics of transformers' Gemma3ForCausalLM. Norm
weights are stored as their distance from one. T is tokens of the forward, L rows that want logits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cache_runtime.layer_binding import PagedAttention
from model_runtime.config import ModelConfig
from model_runtime.forward_batch import ForwardBatch
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layers.attention import CachedAttention
from model_runtime.layers.grouped_query import query_key_value_rows
from model_runtime.layers.mlp import Gate, GatedMlp, gated_mlp_shapes
from model_runtime.layers.norm import RmsNorm
from model_runtime.layers.residual import ResidualStream
from model_runtime.layers.rotary import Angles, RotaryTable, base_frequencies, rotate
from model_runtime.weights import Shape


def gemma3_tensor_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """Shape of every tensor of the family by canonical name."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (query, hidden),
            prefix + "self_attn.k_proj.weight": (key_value, hidden),
            prefix + "self_attn.v_proj.weight": (key_value, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, query),
            prefix + "self_attn.q_norm.weight": (config.head_dim,),
            prefix + "self_attn.k_norm.weight": (config.head_dim,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "pre_feedforward_layernorm.weight": (hidden,),
            **gated_mlp_shapes(prefix + "mlp.", hidden, intermediate),
            prefix + "post_feedforward_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _norm(builder: LayerBuilder, name: str) -> RmsNorm:
    return RmsNorm(builder.tensor(name) + 1.0, builder.config.rms_norm_eps, builder.kernels)


class Gemma3Attention:
    """Projections, norms of query and key heads, rotation and attention of one layer, of this rank's heads."""

    def __init__(self, layer: int, builder: LayerBuilder) -> None:
        config, prefix = builder.config, f"model.layers.{layer}.self_attn."
        self._kernels, self._head_dim = builder.kernels, config.head_dim
        self._num_heads = len(builder.heads(config.num_heads))
        self._num_kv_heads = len(builder.heads(config.num_kv_heads))
        self._qkv = builder.linear(*query_key_value_rows(prefix, builder))
        self._query_norm = _norm(builder, prefix + "q_norm.weight")  # [head_dim]
        self._key_norm = _norm(builder, prefix + "k_norm.weight")  # [head_dim]
        self._output = builder.heads_output(prefix + "o_proj.weight")  # [hidden, num_heads * head_dim]
        self.cached = CachedAttention(layer, config, self._num_kv_heads)

    def __call__(self, hidden: torch.Tensor, angles: Angles, context: ForwardContext) -> torch.Tensor:
        heads = self._qkv(hidden)  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
        heads = heads.view(hidden.shape[0], -1, self._head_dim)  # [T, num_heads + 2 * num_kv_heads, head_dim]
        first_key, first_value = self._num_heads, self._num_heads + self._num_kv_heads
        query = self._turn(self._query_norm, heads[:, :first_key], angles)  # [T, num_heads, head_dim]
        key = self._turn(self._key_norm, heads[:, first_key:first_value], angles)  # [T, num_kv_heads, head_dim]
        attended = self.cached(query, key, heads[:, first_value:], context)  # [T, num_heads, head_dim]
        return self._output(attended.flatten(1))  # [T, hidden]

    def _turn(self, norm: RmsNorm, heads: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Every head on its own to unit mean square, then turned."""
        normed = norm(heads.reshape(-1, self._head_dim)).view(heads.shape)
        return rotate(normed, angles, self._kernels)


class Gemma3Layer:
    """One residual block: attention, then the MLP, each between two norms."""

    def __init__(self, layer: int, builder: LayerBuilder) -> None:
        prefix = f"model.layers.{layer}."
        self._before_attention = _norm(builder, prefix + "input_layernorm.weight")  # [hidden]
        self._after_attention = _norm(builder, prefix + "post_attention_layernorm.weight")  # [hidden]
        self._before_mlp = _norm(builder, prefix + "pre_feedforward_layernorm.weight")  # [hidden]
        self._after_mlp = _norm(builder, prefix + "post_feedforward_layernorm.weight")  # [hidden]
        self.attention = Gemma3Attention(layer, builder)
        self._mlp = GatedMlp(prefix + "mlp.", builder, Gate.GELU_TANH)

    def __call__(self, stream: ResidualStream, angles: Angles, context: ForwardContext) -> None:
        attended = self.attention(stream.normed(self._before_attention), angles, context)  # [T, hidden]
        stream.add(self._after_attention(attended))
        stream.add(self._after_mlp(self._mlp(stream.normed(self._before_mlp))))


class Gemma3Model:
    """The whole decoder. Reads its weights from the builder's source, whose tensors have been checked before."""

    def __init__(self, builder: LayerBuilder) -> None:
        config = builder.config
        self._full_rotary = RotaryTable.of(config)
        sliding_theta = config.rope_theta if config.sliding is None else config.sliding.rope_theta
        self._sliding_rotary = RotaryTable(base_frequencies(sliding_theta, config.head_dim))
        self._embedding = builder.embedding("model.embed_tokens.weight")  # [vocab, hidden]
        self._embedding_scale = config.hidden_size**0.5
        self._layers = tuple(Gemma3Layer(layer, builder) for layer in range(config.num_layers))
        self._norm = _norm(builder, "model.norm.weight")  # [hidden]
        # [vocab, hidden]
        self._head = self._embedding.head if config.tie_word_embeddings else builder.linear("lm_head.weight")

    @property
    def cache_layers(self) -> tuple[PagedAttention, ...]:
        return tuple(layer.attention.cached.declaration for layer in self._layers)

    def forward(self, batch: ForwardBatch, context: ForwardContext) -> torch.Tensor:
        """Logits float32[L, vocab] of the batch's `logit_tokens`; every layer's cache rows are written on the way."""
        full, sliding = self._full_rotary.at(batch.positions), self._sliding_rotary.at(batch.positions)
        stream = ResidualStream(self._embedding(batch.token_ids).mul_(self._embedding_scale))
        for layer, declaration in zip(self._layers, self.cache_layers, strict=True):
            layer(stream, full if declaration.window_left_tokens is None else sliding, context)
        last = stream.normed(self._norm)[batch.logit_tokens]  # [L, hidden]
        return self._head(last)  # [L, vocab]
