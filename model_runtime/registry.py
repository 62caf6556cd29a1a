"""Which code runs which model on which device: the one table of families, and the kernels of each device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from cache_runtime.kernel_page_sizes import CPU_PAGED
from cache_runtime.layer_binding import PagedAttention
from cache_runtime.recipes.base import CacheRecipe
from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.sliding_full import SlidingFullCacheRecipe
from cache_runtime.scheduler_bridge import SchedulerLimits
from model_runtime.config import ModelConfig
from model_runtime.errors import CheckpointError, UnsupportedDtypeError
from model_runtime.forward_batch import ForwardBatch
from model_runtime.kernels import _native
from model_runtime.kernels.interface import Kernels
from model_runtime.layers.attention import AttentionContext
from model_runtime.models.gemma3 import Gemma3Model, gemma3_tensor_shapes
from model_runtime.models.llama import LlamaModel, llama_tensor_shapes
from model_runtime.weights import Shape, TensorSource


class Model(Protocol):
    """A loaded model: weights and the layers' declarations, no cache and no request."""

    @property
    def attention_layers(self) -> tuple[PagedAttention, ...]: ...

    def forward(self, batch: ForwardBatch, context: AttentionContext) -> torch.Tensor:
        """float32[number of logit tokens, vocab_size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBudget:
    """What a recipe is given besides the model: bytes for the arena, tokens per prefix grain, and who will use it."""

    memory_bytes: int
    prefix_granularity: int
    dtype: str
    scheduler_limits: SchedulerLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The seams of one family: which tensors it needs, how it caches, how it is built."""

    tensor_shapes: Callable[[ModelConfig], Mapping[str, Shape]]
    cache_recipe: Callable[[ModelConfig, CacheBudget], CacheRecipe]
    build: Callable[[ModelConfig, TensorSource, torch.dtype, Kernels], Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBackend:
    """The kernels of a device and the name under which their page sizes are registered."""

    page_size_backend: str
    kernels: Kernels


def find_family(architecture: str) -> ModelFamily:
    """Raises CheckpointError naming the architectures there are."""
    if architecture not in _FAMILIES:
        raise CheckpointError(f'architecture "{architecture}" is not supported (supported: {", ".join(_FAMILIES)})')
    return _FAMILIES[architecture]


def compute_dtype(name: str) -> torch.dtype:
    """The torch dtype of weights and activations on the CPU. Raises UnsupportedDtypeError."""
    if name not in _CPU_DTYPES:
        raise UnsupportedDtypeError(f'dtype "{name}" has no CPU kernels (supported: {", ".join(_CPU_DTYPES)})')
    return _CPU_DTYPES[name]


def cpu_backend(num_threads: int) -> KernelBackend:
    """The native kernels of the best instruction set this CPU has. Raises ValueError for num_threads below 1."""
    return KernelBackend(page_size_backend=CPU_PAGED, kernels=_native.CpuKernels(num_threads))


def _dense_recipe(config: ModelConfig, budget: CacheBudget) -> CacheRecipe:
    return DenseCacheRecipe(
        prefix_granularity=budget.prefix_granularity,
        memory_bytes=budget.memory_bytes,
        scheduler_limits=budget.scheduler_limits,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=budget.dtype,
    )


def _sliding_full_recipe(config: ModelConfig, budget: CacheBudget) -> CacheRecipe:
    if config.sliding is None:
        return _dense_recipe(config, budget)
    return SlidingFullCacheRecipe(
        prefix_granularity=budget.prefix_granularity,
        memory_bytes=budget.memory_bytes,
        scheduler_limits=budget.scheduler_limits,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=budget.dtype,
        is_sliding=config.sliding.is_sliding,
        sliding_window_tokens=config.sliding.window_tokens,
    )


_FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        "LlamaForCausalLM": ModelFamily(
            tensor_shapes=llama_tensor_shapes, cache_recipe=_dense_recipe, build=LlamaModel
        ),
        "Gemma3ForCausalLM": ModelFamily(
            tensor_shapes=gemma3_tensor_shapes, cache_recipe=_sliding_full_recipe, build=Gemma3Model
        ),
    }
)
_CPU_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"float32": torch.float32})
