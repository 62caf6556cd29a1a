"""The Llama family: dense pre-norm decoder with grouped-query attention, rotary positions and a gated MLP.

Source: Touvron et al. 2023, "Llama 2"; tensor names and numerics of transformers' LlamaForCausalLM. Query, key and
value projections are one product, and so are gate and up. T is tokens of the forward.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_runtime.layer_binding import PagedAttention
from model_runtime.config import ModelConfig
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layers.grouped_query import GroupedQueryAttention, grouped_query_shapes
from model_runtime.layers.mlp import GatedMlp, gated_mlp_shapes
from model_runtime.layers.residual import ResidualStream
from model_runtime.layers.rotary import Angles
from model_runtime.models.decoder import Decoder
from model_runtime.weights import Shape


def llama_tensor_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """Shape of every tensor of the family by canonical name."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + "input_layernorm.weight": (hidden,), prefix + "post_attention_layernorm.weight": (hidden,)}
        shapes |= grouped_query_shapes(prefix + "self_attn.", config)
        shapes |= gated_mlp_shapes(prefix + "mlp.", hidden, config.intermediate_size)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class LlamaLayer:
    """One residual block: attention, then the MLP, each behind its norm."""

    def __init__(self, layer: int, builder: LayerBuilder) -> None:
        prefix = f"model.layers.{layer}."
        self._attention_norm = builder.norm(prefix + "input_layernorm.weight")  # [hidden]
        self._mlp_norm = builder.norm(prefix + "post_attention_layernorm.weight")  # [hidden]
        self._attention = GroupedQueryAttention(layer, prefix + "self_attn.", builder)
        self._mlp = GatedMlp(prefix + "mlp.", builder)

    @property
    def declarations(self) -> tuple[PagedAttention, ...]:
        return (self._attention.cached.declaration,)

    def __call__(self, stream: ResidualStream, angles: Angles, context: ForwardContext) -> None:
        stream.add(self._attention(stream.normed(self._attention_norm), angles, context))
        stream.add(self._mlp(stream.normed(self._mlp_norm)))


class LlamaModel(Decoder):
    """The whole decoder. Reads its weights from the builder's source, whose tensors have been checked before."""

    def __init__(self, builder: LayerBuilder) -> None:
        config = builder.config
        blocks = [LlamaLayer(layer, builder) for layer in range(config.num_layers)]
        super().__init__(builder, blocks, builder.norm("model.norm.weight"))
