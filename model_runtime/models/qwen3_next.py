"""The Qwen3-Next family: gated delta nets and gated attention in turns, with experts behind either.

Source: Qwen Team 2025, "Qwen3-Next"; tensor names and numerics of transformers' Qwen3NextForCausalLM. Norm weights,
except those inside a delta net, are stored as their distance from one. T is tokens of the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cache_runtime.layer_binding import CacheLayer
from model_runtime.config import ModelConfig
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.experts import ExpertsConfig
from model_runtime.layers.attention import CachedAttention
from model_runtime.layers.delta_net import DeltaNet, delta_net_of, delta_net_shapes
from model_runtime.layers.experts import Experts, Router, expert_shapes, sigmoid
from model_runtime.layers.mlp import GatedMlp, gated_mlp_shapes
from model_runtime.layers.norm import RmsNorm
from model_runtime.layers.residual import ResidualStream
from model_runtime.layers.rotary import Angles, rotate
from model_runtime.models.decoder import Decoder
from model_runtime.weights import Shape, TensorRows


def qwen3_next_tensor_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """Shape of every tensor of the family by canonical name."""
    hidden, delta_net = config.hidden_size, delta_net_of(config)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer, is_recurrent in enumerate(delta_net.is_recurrent):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + "input_layernorm.weight": (hidden,), prefix + "post_attention_layernorm.weight": (hidden,)}
        if is_recurrent:
            shapes |= delta_net_shapes(prefix + "linear_attn.", hidden, delta_net)
        else:
            shapes |= _attention_shapes(prefix + "self_attn.", config)
        shapes |= _feed_forward_shapes(prefix + "mlp.", layer, config)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _attention_shapes(prefix: str, config: ModelConfig) -> Mapping[str, Shape]:
    hidden, query, key_value = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    return {
        prefix + "q_proj.weight": (2 * query, hidden),
        prefix + "k_proj.weight": (key_value, hidden),
        prefix + "v_proj.weight": (key_value, hidden),
        prefix + "o_proj.weight": (hidden, query),
        prefix + "q_norm.weight": (config.head_dim,),
        prefix + "k_norm.weight": (config.head_dim,),
    }


def _feed_forward_shapes(prefix: str, layer: int, config: ModelConfig) -> Mapping[str, Shape]:
    experts, hidden = _experts_of_layer(layer, config), config.hidden_size
    if experts is None:
        return gated_mlp_shapes(prefix, hidden, config.intermediate_size)
    return {
        prefix + "gate.weight": (experts.num_experts, hidden),
        prefix + "shared_expert_gate.weight": (1, hidden),
        **expert_shapes(prefix + "experts.", hidden, experts),
        **gated_mlp_shapes(prefix + "shared_expert.", hidden, experts.shared_intermediate_size),
    }


def _experts_of_layer(layer: int, config: ModelConfig) -> ExpertsConfig | None:
    return config.experts if config.experts is not None and config.experts.is_sparse[layer] else None


def _norm(builder: LayerBuilder, name: str) -> RmsNorm:
    return RmsNorm(builder.tensor(name) + 1.0, builder.config.rms_norm_eps, builder.kernels)


class Qwen3NextAttention:
    """Attention of one layer, this rank's heads: they are normed and turn in part, and a gate decides what passes."""

    def __init__(self, layer: int, prefix: str, builder: LayerBuilder) -> None:
        config = builder.config
        self._kernels, self._head_dim = builder.kernels, config.head_dim
        self._num_heads = len(builder.heads(config.num_heads))
        self._num_kv_heads = len(builder.heads(config.num_kv_heads))
        # [(2 * num_heads + 2 * num_kv_heads) * head_dim, hidden]
        kv_heads = builder.heads(config.num_kv_heads)
        self._projections = builder.linear_arranged(
            TensorRows.of_heads(prefix + "q_proj.weight", builder.heads(config.num_heads), 2 * config.head_dim),
            *(TensorRows.of_heads(f"{prefix}{name}_proj.weight", kv_heads, config.head_dim) for name in "kv"),
            arrange=lambda parts: _by_kind(parts, config.head_dim),
        )
        self._query_norm = _norm(builder, prefix + "q_norm.weight")  # [head_dim]
        self._key_norm = _norm(builder, prefix + "k_norm.weight")  # [head_dim]
        self._output = builder.heads_output(prefix + "o_proj.weight")  # [hidden, num_heads * head_dim]
        self.cached = CachedAttention(layer, config, self._num_kv_heads)

    def __call__(self, hidden: torch.Tensor, angles: Angles, context: ForwardContext) -> torch.Tensor:
        heads = self._projections(hidden).view(hidden.shape[0], -1, self._head_dim)  # [T, all heads, head_dim]
        parts = [self._num_heads, self._num_heads, self._num_kv_heads, self._num_kv_heads]
        gate, query, key, value = torch.split(heads, parts, dim=1)
        query = self._turn(self._query_norm, query, angles)  # [T, num_heads, head_dim]
        key = self._turn(self._key_norm, key, angles)  # [T, num_kv_heads, head_dim]
        attended = self.cached(query, key, value, context).flatten(1)  # [T, num_heads * head_dim]
        passed = torch.empty_like(attended)
        self._kernels.sigmoid_multiply(torch.cat((gate.flatten(1), attended), dim=1), passed)
        return self._output(passed)  # [T, hidden]

    def _turn(self, norm: RmsNorm, heads: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Every head on its own to unit mean square, then its first dimensions turned."""
        normed = norm(heads.reshape(-1, self._head_dim)).view(heads.shape)
        return rotate(normed, angles, self._kernels)


def _by_kind(parts: Sequence[torch.Tensor], head_dim: int) -> torch.Tensor:
    """Rows in the order gates, queries, keys, values. A file has each head's query and gate together."""
    paired, key, value = parts
    query, gate = paired.view(-1, 2, head_dim, paired.shape[1]).unbind(dim=1)
    return torch.cat((gate.flatten(0, 1), query.flatten(0, 1), key, value))


class Qwen3NextExperts:
    """Routed experts beside one that all tokens go through, as far as its own gate lets them."""

    def __init__(self, prefix: str, builder: LayerBuilder, config: ExpertsConfig) -> None:
        self._kernels = builder.kernels
        self._router = Router(prefix + "gate.weight", None, builder, config)
        self._experts = Experts(prefix + "experts.", builder, config)
        self._shared = GatedMlp(prefix + "shared_expert.", builder)
        self._shared_gate = builder.linear(prefix + "shared_expert_gate.weight")  # [1, hidden]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        routed = self._experts(hidden, *self._router(hidden))  # [T, hidden]
        passed = sigmoid(self._shared_gate(hidden), self._kernels)  # [T, 1]
        return routed.add_(self._shared(hidden).mul_(passed))  # [T, hidden]


class Qwen3NextLayer:
    """One residual block: a delta net or attention, then the feed-forward network, each behind its norm."""

    def __init__(self, layer: int, builder: LayerBuilder) -> None:
        prefix, delta_net = f"model.layers.{layer}.", delta_net_of(builder.config)
        self._mixer_norm = _norm(builder, prefix + "input_layernorm.weight")  # [hidden]
        self._feed_forward_norm = _norm(builder, prefix + "post_attention_layernorm.weight")  # [hidden]
        self._mixer = (
            DeltaNet(layer, prefix + "linear_attn.", builder, delta_net)
            if delta_net.is_recurrent[layer]
            else Qwen3NextAttention(layer, prefix + "self_attn.", builder)
        )
        experts = _experts_of_layer(layer, builder.config)
        self._feed_forward = (
            GatedMlp(prefix + "mlp.", builder)
            if experts is None
            else Qwen3NextExperts(prefix + "mlp.", builder, experts)
        )

    @property
    def declarations(self) -> tuple[CacheLayer, ...]:
        return (self._mixer.cached.declaration,)

    def __call__(self, stream: ResidualStream, angles: Angles, context: ForwardContext) -> None:
        normed = stream.normed(self._mixer_norm)  # [T, hidden]
        stream.add(
            self._mixer(normed, context) if isinstance(self._mixer, DeltaNet) else self._mixer(normed, angles, context)
        )
        stream.add(self._feed_forward(stream.normed(self._feed_forward_norm)))


class Qwen3NextModel(Decoder):
    """The whole decoder. Reads its weights from the builder's source, whose tensors have been checked before."""

    def __init__(self, builder: LayerBuilder) -> None:
        config = builder.config
        blocks = [Qwen3NextLayer(layer, builder) for layer in range(config.num_layers)]
        super().__init__(builder, blocks, _norm(builder, "model.norm.weight"))
