"""The registry of kernel page geometry: which page spans each attention backend accepts.

A kernel page size is a property of a kernel, in tokens. It comes from here or from explicit configuration, never from
the scheduler's grain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cache_runtime.errors import CacheConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPageSize:
    """A kernel compiled for one page span."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedPageSize:
    """A kernel that supports a few page spans."""

    supported_tokens: frozenset[int]
    default_tokens: int

    def __post_init__(self) -> None:
        if self.default_tokens not in self.supported_tokens:
            raise CacheConfigError(
                f"default_tokens {self.default_tokens} is not among the supported {sorted(self.supported_tokens)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexiblePageSize:
    """A kernel that takes any page span."""

    default_tokens: int


KernelPageSize = FixedPageSize | ConstrainedPageSize | FlexiblePageSize

CPU_PAGED = "cpu_paged"
"""Paged attention on the CPU (model_runtime's native kernel and its torch reference)."""

TORCH_PAGED = "torch_paged"
"""Attention in plain torch operations, which gathers pages, on any device."""

KERNEL_PAGE_SIZES: Mapping[str, KernelPageSize] = MappingProxyType(
    {CPU_PAGED: FlexiblePageSize(default_tokens=16), TORCH_PAGED: FlexiblePageSize(default_tokens=16)}
)


def resolve_kernel_page_size(backend: str, *, block_granularity: int, override: int | None = None) -> int:
    """Page span in tokens of `backend`: the configured `override` when given, else the registered default.

    Raises CacheConfigError for an unknown backend, a span the kernel does not support, or one that does not divide the
    group's `block_granularity`.
    """
    if backend not in KERNEL_PAGE_SIZES:
        raise CacheConfigError(
            f'attention backend "{backend}" is not registered (known: {", ".join(KERNEL_PAGE_SIZES)})'
        )
    tokens = _choose(backend, KERNEL_PAGE_SIZES[backend], override)
    if block_granularity % tokens:
        hint = "" if override is not None else "; set kernel_page_size to a divisor"
        raise CacheConfigError(
            f'kernel_page_size {tokens} of backend "{backend}" must divide block_granularity {block_granularity}{hint}'
        )
    return tokens


def _choose(backend: str, registered: KernelPageSize, override: int | None) -> int:
    if override is not None and override < 1:
        raise CacheConfigError(f"kernel_page_size must be at least 1, got {override}")
    match registered:
        case FixedPageSize(tokens=tokens):
            supported, default = frozenset({tokens}), tokens
        case ConstrainedPageSize(supported_tokens=supported_tokens, default_tokens=default_tokens):
            supported, default = supported_tokens, default_tokens
        case FlexiblePageSize(default_tokens=default_tokens):
            return default_tokens if override is None else override
    if override is not None and override not in supported:
        raise CacheConfigError(
            f'kernel_page_size {override} is not supported by backend "{backend}" (supported: {sorted(supported)})'
        )
    return default if override is None else override
