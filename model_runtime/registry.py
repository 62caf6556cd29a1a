"""Which code runs which model on which device: the one table of families, and the kernels of each device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from cache_runtime.kernel_page_sizes import CPU_PAGED, TORCH_PAGED
from model_runtime.errors import CheckpointError, UnsupportedDtypeError
from model_runtime.families import bamba, deepseek, deepseek_sparse, gemma3, kimi_linear, llama, qwen3_next
from model_runtime.family import ModelFamily
from model_runtime.kernels import _native
from model_runtime.kernels.interface import Kernels
from model_runtime.kernels.torch_kernels import TorchKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBackend:
    """The kernels of a device and the name under which their page sizes are registered."""

    page_size_backend: str
    kernels: Kernels
    is_batch_invariant: bool
    """Whether a request's logits have the same bits whatever shares its batch and however its prompt is cut."""


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
    kernels = _native.CpuKernels(num_threads)
    return KernelBackend(page_size_backend=CPU_PAGED, kernels=kernels, is_batch_invariant=True)


def torch_backend(device: torch.device) -> KernelBackend:
    """Kernels for every device torch computes on."""
    return KernelBackend(page_size_backend=TORCH_PAGED, kernels=TorchKernels(device), is_batch_invariant=False)


def find_backend(device: torch.device, num_threads: int) -> KernelBackend:
    """The fastest kernels for the device. Raises ValueError for num_threads below 1."""
    return cpu_backend(num_threads) if device.type == "cpu" else torch_backend(device)


_FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        "LlamaForCausalLM": llama.FAMILY,
        "Gemma3ForCausalLM": gemma3.FAMILY,
        "DeepseekV2ForCausalLM": deepseek.FAMILY,
        "DeepseekV3ForCausalLM": deepseek.FAMILY,
        "DeepseekV32ForCausalLM": deepseek_sparse.FAMILY,
        "BambaForCausalLM": bamba.FAMILY,
        "KimiLinearForCausalLM": kimi_linear.FAMILY,
        "Qwen3NextForCausalLM": qwen3_next.FAMILY,
    }
)
_CPU_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"float32": torch.float32})
