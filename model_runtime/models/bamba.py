"""The Bamba family: Mamba-2 state spaces, a few layers of attention between them, and a dense network behind each.

Source: Dao and Gu 2024, "Transformers are SSMs"; tensor names and numerics of transformers' BambaForCausalLM. T is
tokens of the forward.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_runtime.layer_binding import CacheLayer
from model_runtime.config import ModelConfig
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layer_configs.mamba2 import Mamba2Config
from model_runtime.layers.grouped_query import GroupedQueryAttention, grouped_query_shapes
from model_runtime.layers.mamba2 import Mamba2, mamba2_shapes
from model_runtime.layers.mlp import GatedMlp, gated_mlp_shapes
from model_runtime.layers.residual import ResidualStream
from model_runtime.layers.rotary import Angles
from model_runtime.models.decoder import Decoder
from model_runtime.weights import Shape


def mamba2_of(config: ModelConfig) -> Mamba2Config:
    """Raises ValueError for a model without state spaces."""
    if config.mamba2 is None:
        raise ValueError(f"{config.architecture}: the config has no mamba2")
    return config.mamba2


def bamba_tensor_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """Shape of every tensor of the family by canonical name."""
    hidden, mamba2 = config.hidden_size, mamba2_of(config)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer, is_recurrent in enumerate(mamba2.is_recurrent):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + "input_layernorm.weight": (hidden,), prefix + "pre_ff_layernorm.weight": (hidden,)}
        if is_recurrent:
            shapes |= mamba2_shapes(prefix + "mamba.", hidden, mamba2)
        else:
            shapes |= grouped_query_shapes(prefix + "self_attn.", config)
        shapes |= gated_mlp_shapes(prefix + "feed_forward.", hidden, config.intermediate_size)
    shapes["model.final_layernorm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class BambaLayer:
    """One residual block: a state space or attention, then the feed-forward network, each behind its norm."""

    def __init__(self, layer: int, builder: LayerBuilder) -> None:
        prefix, mamba2 = f"model.layers.{layer}.", mamba2_of(builder.config)
        self._mixer_norm = builder.norm(prefix + "input_layernorm.weight")  # [hidden]
        self._mlp_norm = builder.norm(prefix + "pre_ff_layernorm.weight")  # [hidden]
        self._mlp = GatedMlp(prefix + "feed_forward.", builder)
        self._mixer = (
            Mamba2(layer, prefix + "mamba.", builder, mamba2)
            if mamba2.is_recurrent[layer]
            else GroupedQueryAttention(layer, prefix + "self_attn.", builder)
        )

    @property
    def declarations(self) -> tuple[CacheLayer, ...]:
        return (self._mixer.cached.declaration,)

    def __call__(self, stream: ResidualStream, angles: Angles, context: ForwardContext) -> None:
        normed = stream.normed(self._mixer_norm)  # [T, hidden]
        stream.add(
            self._mixer(normed, context) if isinstance(self._mixer, Mamba2) else self._mixer(normed, angles, context)
        )
        stream.add(self._mlp(stream.normed(self._mlp_norm)))


class BambaModel(Decoder):
    """The whole decoder. Reads its weights from the builder's source, whose tensors have been checked before."""

    def __init__(self, builder: LayerBuilder) -> None:
        config = builder.config
        blocks = [BambaLayer(layer, builder) for layer in range(config.num_layers)]
        super().__init__(builder, blocks, builder.norm("model.final_layernorm.weight"))
