"""The frame of a decoder-only model: embedding, residual blocks, last norm, head. What a block is, its family says.

T is tokens of the forward, L rows that want logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from cache_runtime.layer_binding import CacheLayer
from model_runtime.forward_batch import ForwardBatch
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.layers.norm import RmsNorm
from model_runtime.layers.residual import ResidualStream
from model_runtime.layers.rotary import Angles, RotaryTable


class DecoderBlock(Protocol):
    """One residual block."""

    @property
    def declarations(self) -> tuple[CacheLayer, ...]:
        """One per cache group that the block deposits anything in."""

    def __call__(self, stream: ResidualStream, angles: Angles, context: ForwardContext) -> None:
        """Reads the stream and adds to it."""


class Decoder:
    """Blocks that all turn by the same angles."""

    def __init__(self, builder: LayerBuilder, blocks: Sequence[DecoderBlock], norm: RmsNorm) -> None:
        self._rotary = RotaryTable.of(builder.config)
        self._embedding = builder.embedding("model.embed_tokens.weight")  # [vocab, hidden]
        self._blocks = tuple(blocks)
        self._norm = norm  # [hidden]
        is_tied = builder.config.tie_word_embeddings
        own_head = None if is_tied else builder.without_adapters().linear("lm_head.weight")
        self._head = own_head or self._embedding.head  # [vocab, hidden]

    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return tuple(declaration for block in self._blocks for declaration in block.declarations)

    def forward(self, batch: ForwardBatch, context: ForwardContext) -> torch.Tensor:
        """Logits float32[L, vocab] of the batch's `logit_tokens`; every layer's rows or states are left on the way."""
        angles = self._rotary.at(batch.positions)
        stream = ResidualStream(self._embedding(batch.token_ids))
        for block in self._blocks:
            block(stream, angles, context)
        last = stream.normed(self._norm)[batch.logit_tokens]  # [L, hidden]
        return self._head(last)  # [L, vocab]
