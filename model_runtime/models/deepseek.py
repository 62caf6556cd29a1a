"""The DeepSeek V2, V3 and V3.2 families: latent attention, and experts behind the first dense layers.

In V3.2 an indexer chooses the rows that a token attends to.

Source: DeepSeek-AI 2024, "DeepSeek-V2" and "DeepSeek-V3", 2025, "DeepSeek-V3.2"; tensor names and numerics of
transformers' DeepseekV2ForCausalLM and its successors. T is tokens of the forward.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_runtime.layer_binding import PagedAttention
from model_runtime.config import ModelConfig
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layers.feed_forward import build_feed_forward, feed_forward_shapes
from model_runtime.layers.latent_attention import LatentAttention, latent_attention_shapes, latent_of
from model_runtime.layers.residual import ResidualStream
from model_runtime.layers.rotary import Angles
from model_runtime.layers.sparse_index import SparseIndex, sparse_index_shapes
from model_runtime.models.decoder import Decoder
from model_runtime.weights import Shape


def deepseek_tensor_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """Shape of every tensor of the family by canonical name."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + "input_layernorm.weight": (hidden,), prefix + "post_attention_layernorm.weight": (hidden,)}
        shapes |= latent_attention_shapes(prefix + "self_attn.", config)
        shapes |= _index_shapes(prefix + "self_attn.indexer.", config)
        shapes |= feed_forward_shapes(prefix + "mlp.", layer, config)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _index_shapes(prefix: str, config: ModelConfig) -> Mapping[str, Shape]:
    query_rank = latent_of(config).query_rank
    if config.sparse_index is None or query_rank is None:
        return {}
    return sparse_index_shapes(prefix, query_rank, config)


class DeepseekLayer:
    """One residual block: attention, then the feed-forward network, each behind its norm."""

    def __init__(self, layer: int, builder: LayerBuilder) -> None:
        prefix = f"model.layers.{layer}."
        self._attention_norm = builder.norm(prefix + "input_layernorm.weight")  # [hidden]
        self._feed_forward_norm = builder.norm(prefix + "post_attention_layernorm.weight")  # [hidden]
        has_index = builder.config.sparse_index is not None
        self._index = SparseIndex(layer, prefix + "self_attn.indexer.", builder) if has_index else None
        self._attention = LatentAttention(layer, prefix + "self_attn.", builder, self._index)
        self._feed_forward = build_feed_forward(prefix + "mlp.", layer, builder)

    @property
    def declarations(self) -> tuple[PagedAttention, ...]:
        """Of the rows, and of the index keys if there are any."""
        of_rows = self._attention.declaration
        return (of_rows,) if self._index is None else (of_rows, self._index.declaration)

    def __call__(self, stream: ResidualStream, angles: Angles, context: ForwardContext) -> None:
        stream.add(self._attention(stream.normed(self._attention_norm), angles, context))
        stream.add(self._feed_forward(stream.normed(self._feed_forward_norm)))


class DeepseekModel(Decoder):
    """The whole decoder. Reads its weights from the builder's source, whose tensors have been checked before."""

    def __init__(self, builder: LayerBuilder) -> None:
        config = builder.config
        blocks = [DeepseekLayer(layer, builder) for layer in range(config.num_layers)]
        super().__init__(builder, blocks, builder.norm("model.norm.weight"))
