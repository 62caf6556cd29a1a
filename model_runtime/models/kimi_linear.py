"""The Kimi Linear family: delta attention and latent attention in turns, with experts behind either. Nothing turns.

Source: Kimi Team 2025, "Kimi Linear"; tensor names and numerics of transformers' KimiLinearForCausalLM. T is tokens of
the forward, L rows that want logits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cache_runtime.layer_binding import CacheLayer
from model_runtime.config import ModelConfig
from model_runtime.forward_batch import ForwardBatch
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layers.delta_net import delta_net_of
from model_runtime.layers.feed_forward import build_feed_forward, feed_forward_shapes
from model_runtime.layers.kimi_delta import KimiDelta, kimi_delta_shapes
from model_runtime.layers.latent_attention import LatentAttention, latent_attention_shapes
from model_runtime.layers.residual import ResidualStream
from model_runtime.weights import Shape


def kimi_linear_tensor_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """Shape of every tensor of the family by canonical name."""
    hidden, delta_net = config.hidden_size, delta_net_of(config)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer, is_recurrent in enumerate(delta_net.is_recurrent):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + "input_layernorm.weight": (hidden,), prefix + "post_attention_layernorm.weight": (hidden,)}
        if is_recurrent:
            shapes |= kimi_delta_shapes(prefix + "self_attn.", hidden, delta_net)
        else:
            shapes |= latent_attention_shapes(prefix + "self_attn.", config)
        shapes |= feed_forward_shapes(prefix + "mlp.", layer, config)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class KimiLinearLayer:
    """One residual block: delta or latent attention, then the feed-forward network, each behind its norm."""

    def __init__(self, layer: int, builder: LayerBuilder) -> None:
        prefix, delta_net = f"model.layers.{layer}.", delta_net_of(builder.config)
        self._mixer_norm = builder.norm(prefix + "input_layernorm.weight")  # [hidden]
        self._feed_forward_norm = builder.norm(prefix + "post_attention_layernorm.weight")  # [hidden]
        self._mixer = (
            KimiDelta(layer, prefix + "self_attn.", builder, delta_net)
            if delta_net.is_recurrent[layer]
            else LatentAttention(layer, prefix + "self_attn.", builder)
        )
        self._feed_forward = build_feed_forward(prefix + "mlp.", layer, builder)

    @property
    def declaration(self) -> CacheLayer:
        return self._mixer.cached.declaration if isinstance(self._mixer, KimiDelta) else self._mixer.declaration

    def __call__(self, stream: ResidualStream, context: ForwardContext) -> None:
        normed = stream.normed(self._mixer_norm)  # [T, hidden]
        stream.add(
            self._mixer(normed, context) if isinstance(self._mixer, KimiDelta) else self._mixer(normed, None, context)
        )
        stream.add(self._feed_forward(stream.normed(self._feed_forward_norm)))


class KimiLinearModel:
    """The whole decoder. Reads its weights from the builder's source, whose tensors have been checked before."""

    def __init__(self, builder: LayerBuilder) -> None:
        config = builder.config
        self._embedding = builder.embedding("model.embed_tokens.weight")  # [vocab, hidden]
        self._layers = tuple(KimiLinearLayer(layer, builder) for layer in range(config.num_layers))
        self._norm = builder.norm("model.norm.weight")  # [hidden]
        # [vocab, hidden]
        self._head = self._embedding.head if config.tie_word_embeddings else builder.linear("lm_head.weight")

    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return tuple(layer.declaration for layer in self._layers)

    def forward(self, batch: ForwardBatch, context: ForwardContext) -> torch.Tensor:
        """Logits float32[L, vocab] of the batch's `logit_tokens`; every layer's rows or states are left on the way."""
        stream = ResidualStream(self._embedding(batch.token_ids))
        for layer in self._layers:
            layer(stream, context)
        last = stream.normed(self._norm)[batch.logit_tokens]  # [L, hidden]
        return self._head(last)  # [L, vocab]
