"""ModelFamily: the seams that a model family fills in, and what each is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from cache_runtime.layer_binding import CacheLayer
from cache_runtime.recipes.base import CacheRecipe
from cache_runtime.recipes.partition import ONLY_RANK, TensorRank
from cache_runtime.scheduler_bridge import SchedulerLimits
from model_runtime.config import ModelConfig
from model_runtime.forward_batch import ForwardBatch
from model_runtime.forward_context import ForwardContext
from model_runtime.layer_builder import LayerBuilder
from model_runtime.weights import Shape


class Model(Protocol):
    """A loaded model: weights and the layers' declarations, no cache and no request."""

    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]: ...

    def forward(self, batch: ForwardBatch, context: ForwardContext) -> torch.Tensor:
        """float32[number of logit tokens, vocab_size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBudget:
    """What a recipe is given besides the model: bytes for the arena, tokens per prefix grain, and who will use it.

    `shard_count` context ranks, each with so many bytes, share the blocks of what can be shared. The cache is that of
    `tensor_rank`, which has some of the heads.
    """

    memory_bytes: int
    prefix_granularity: int
    dtype: str
    scheduler_limits: SchedulerLimits | None = None
    shard_count: int = 1
    tensor_rank: TensorRank = ONLY_RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The seams of one family: which tensors it needs, how it caches, what its layers declare, how it is built.

    `cache_layers` are the declarations of the layers of a model of that shape, known before any weight is read.
    """

    tensor_shapes: Callable[[ModelConfig], Mapping[str, Shape]]
    cache_recipe: Callable[[ModelConfig, CacheBudget], CacheRecipe]
    cache_layers: Callable[[ModelConfig], tuple[CacheLayer, ...]]
    build: Callable[[LayerBuilder], Model]
