"""The kernel page registry: fixed, constrained and flexible kernels, and the configured override."""

from __future__ import annotations

import pytest

from cache_runtime import kernel_page_sizes
from cache_runtime.errors import CacheConfigError
from cache_runtime.kernel_page_sizes import (
    CPU_PAGED,
    ConstrainedPageSize,
    FixedPageSize,
    KernelPageSize,
    resolve_kernel_page_size,
)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: dict[str, KernelPageSize] = {
        "fixed": FixedPageSize(tokens=64),
        "constrained": ConstrainedPageSize(supported_tokens=frozenset({32, 64}), default_tokens=32),
    }
    monkeypatch.setattr(kernel_page_sizes, "KERNEL_PAGE_SIZES", kernels)


def test_the_cpu_kernel_takes_16_tokens_by_default_and_any_divisor_when_configured() -> None:
    assert resolve_kernel_page_size(CPU_PAGED, block_granularity=64) == 16
    assert resolve_kernel_page_size(CPU_PAGED, block_granularity=64, override=1) == 1
    assert resolve_kernel_page_size(CPU_PAGED, block_granularity=24, override=24) == 24


@pytest.mark.parametrize(
    ("block_granularity", "override", "message"),
    [
        (24, None, "kernel_page_size 16 .*must divide block_granularity 24; set kernel_page_size"),
        (64, 48, "kernel_page_size 48 .*must divide block_granularity 64$"),
        (64, 128, "kernel_page_size 128 .*must divide block_granularity 64$"),
        (64, 0, "kernel_page_size must be at least 1, got 0"),
    ],
)
def test_a_page_that_does_not_divide_the_block_is_refused(
    block_granularity: int, override: int | None, message: str
) -> None:
    with pytest.raises(CacheConfigError, match=message):
        resolve_kernel_page_size(CPU_PAGED, block_granularity=block_granularity, override=override)


@pytest.mark.usefixtures("registry")
def test_fixed_kernels_accept_only_their_own_page() -> None:
    assert resolve_kernel_page_size("fixed", block_granularity=128) == 64
    assert resolve_kernel_page_size("fixed", block_granularity=128, override=64) == 64
    with pytest.raises(CacheConfigError, match=r'32 is not supported by backend "fixed" \(supported: \[64\]\)'):
        resolve_kernel_page_size("fixed", block_granularity=128, override=32)


@pytest.mark.usefixtures("registry")
def test_constrained_kernels_choose_within_their_set() -> None:
    assert resolve_kernel_page_size("constrained", block_granularity=128) == 32
    assert resolve_kernel_page_size("constrained", block_granularity=128, override=64) == 64
    with pytest.raises(CacheConfigError, match=r"16 is not supported .*\[32, 64\]"):
        resolve_kernel_page_size("constrained", block_granularity=128, override=16)


def test_an_unknown_backend_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(CacheConfigError, match=r'"magic" is not registered .*cpu_paged'):
        resolve_kernel_page_size("magic", block_granularity=64)


def test_a_constrained_default_must_be_supported() -> None:
    with pytest.raises(CacheConfigError, match=r"default_tokens 16 .*\[32\]"):
        ConstrainedPageSize(supported_tokens=frozenset({32}), default_tokens=16)
