"""The native norm, gate and rotation kernels against the torch reference, in every instruction set this CPU runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model_runtime.kernels import _native
from model_runtime.kernels.reference import ReferenceKernels

WIDTHS = [2, 12, 48, 576]
TOLERANCE = 1e-6

AnyKernels = _native.CpuKernels | ReferenceKernels
Operation = Callable[[AnyKernels, torch.Tensor], torch.Tensor]


def normed(kernels: AnyKernels, x: torch.Tensor) -> torch.Tensor:
    output = torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)
    kernels.rms_norm(x, torch.linspace(0.5, 1.5, x.shape[1]), 1e-5, output)
    return output


def normed_sums(kernels: AnyKernels, x: torch.Tensor) -> torch.Tensor:
    """The norm of what the rows give together with others, and behind it the sums."""
    total = torch.linspace(-2.0, 2.0, x.shape[1]).repeat(x.shape[0], 1)
    output = torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)
    kernels.add_rms_norm(x, total, torch.linspace(0.5, 1.5, x.shape[1]), 1e-5, output)
    return torch.cat((output, total), dim=1)


def gated(kernels: AnyKernels, x: torch.Tensor) -> torch.Tensor:
    output = torch.full((x.shape[0], x.shape[1] // 2), float("nan"))
    kernels.silu_multiply(x, output)
    return output


def gelu_gated(kernels: AnyKernels, x: torch.Tensor) -> torch.Tensor:
    output = torch.full((x.shape[0], x.shape[1] // 2), float("nan"))
    kernels.gelu_tanh_multiply(x, output)
    return output


def opened(kernels: AnyKernels, x: torch.Tensor) -> torch.Tensor:
    output = torch.full((x.shape[0], x.shape[1] // 2), float("nan"))
    kernels.sigmoid_multiply(x, output)
    return output


def rotated(kernels: AnyKernels, x: torch.Tensor) -> torch.Tensor:
    """As one head when the width is small, else as heads of 12."""
    half = x.shape[1] // 2 if x.shape[1] < 12 else 6
    angles = torch.arange(x.shape[0]).unsqueeze(1) * torch.linspace(0.1, 2.0, half)
    output = torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)
    kernels.rotate(x, angles.cos(), angles.sin(), output)
    return output


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    params=[normed, normed_sums, gated, gelu_gated, opened, rotated], ids=lambda operation: operation.__name__
)
def operation(request: pytest.FixtureRequest) -> Operation:
    result: Operation = request.param
    return result


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_match_the_reference(instruction_set: str, operation: Operation, width: int) -> None:
    torch.manual_seed(3)
    x = torch.randn(5, width) * 4
    expected = operation(ReferenceKernels(), x)
    ours = operation(_native.CpuKernels(1, instruction_set), x)
    assert torch.allclose(ours, expected, rtol=TOLERANCE, atol=4 * TOLERANCE)
    assert not torch.equal(ours[:, : x.shape[1] // 2], x[:, : x.shape[1] // 2]), "the operation does something"


def test_a_row_gets_the_same_bits_alone_in_a_batch_and_with_more_threads(
    instruction_set: str, operation: Operation
) -> None:
    torch.manual_seed(4)
    x = torch.randn(200, 1152)
    together = operation(_native.CpuKernels(1, instruction_set), x)
    assert torch.equal(operation(_native.CpuKernels(3, instruction_set), x), together)
    assert torch.equal(operation(_native.CpuKernels(1, instruction_set), x[:7]), together[:7])


@pytest.mark.parametrize("width", WIDTHS)
def test_adding_and_norming_at_once_has_the_bits_of_one_after_the_other(instruction_set: str, width: int) -> None:
    torch.manual_seed(5)
    x, total, weight = torch.randn(7, width), torch.randn(7, width), torch.randn(width)
    kernels = _native.CpuKernels(1, instruction_set)
    expected_total, expected, output = x + total, torch.empty(7, width), torch.empty(7, width)
    kernels.rms_norm(expected_total, weight, 1e-5, expected)
    kernels.add_rms_norm(x, total, weight, 1e-5, output)
    assert torch.equal(total, expected_total)
    assert torch.equal(output, expected)


def test_rows_of_a_wider_tensor_are_read_in_place(instruction_set: str, operation: Operation) -> None:
    wide = torch.randn(9, 100)
    kernels = _native.CpuKernels(1, instruction_set)
    assert torch.equal(operation(kernels, wide[:, 10:58]), operation(kernels, wide[:, 10:58].contiguous()))


@pytest.mark.parametrize("gate", [gated, gelu_gated])
def test_a_gate_saturates_without_overflow(instruction_set: str, gate: Operation) -> None:
    x = torch.tensor([[-2e20, -200.0, -30.0, 0.0, 30.0, 200.0, 2e20, *[1.0] * 7]])
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 30.0, 200.0, 2e20]])
    assert torch.allclose(gate(_native.CpuKernels(1, instruction_set), x), expected, atol=1e-10)


@pytest.mark.parametrize("gate", [gated, gelu_gated])
def test_a_gate_is_relatively_exact_wherever_it_is_open(instruction_set: str, gate: Operation) -> None:
    gates = torch.linspace(-2, 12, 4096)
    x = torch.cat((gates, torch.ones_like(gates))).unsqueeze(0)
    expected = gate(ReferenceKernels(), x)
    assert torch.allclose(gate(_native.CpuKernels(1, instruction_set), x), expected, rtol=TOLERANCE, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: k.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5, torch.zeros(2, 8)), "weight must be as wide"),
        (lambda k: k.rms_norm(torch.zeros(2, 8), torch.zeros(8), 1e-5, torch.zeros(2, 9)), "output has the wrong"),
        (
            lambda k: k.add_rms_norm(*[torch.zeros(2, 8)] * 2, torch.zeros(7), 1e-5, torch.zeros(2, 8)),
            "weight must be as wide",
        ),
        (
            lambda k: k.add_rms_norm(torch.zeros(2, 8), torch.zeros(1, 8), torch.zeros(8), 1e-5, torch.zeros(2, 8)),
            "total must have the shape",
        ),
        (lambda k: k.silu_multiply(torch.zeros(2, 8), torch.zeros(2, 5)), "twice as wide"),
        (lambda k: k.silu_multiply(torch.zeros(2, 8), torch.zeros(3, 4)), "output has the wrong shape"),
        (lambda k: k.gelu_tanh_multiply(torch.zeros(2, 8), torch.zeros(2, 5)), "twice as wide"),
        (lambda k: k.rotate(torch.zeros(2, 8), *[torch.zeros(2, 3)] * 2, torch.zeros(2, 8)), "whole heads"),
        (lambda k: k.rotate(torch.zeros(2, 8), *[torch.zeros(3, 2)] * 2, torch.zeros(2, 8)), "one row per row"),
    ],
)
def test_contradictory_operands_are_refused(call: Callable[[_native.CpuKernels], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(_native.CpuKernels(1))
