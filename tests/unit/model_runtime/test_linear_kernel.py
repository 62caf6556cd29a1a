"""The native linear kernel against the torch reference, in every instruction set this CPU runs."""

from __future__ import annotations

import pytest
import torch

from model_runtime.kernels import _native
from model_runtime.kernels.reference import ReferenceKernels

SHAPES = [(1, 1, 1), (1, 64, 48), (5, 33, 17), (6, 32, 64), (16, 130, 576), (49, 40, 33), (131, 7, 200), (300, 97, 300)]


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def multiply(kernels: _native.CpuKernels | ReferenceKernels, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    output = torch.full((x.shape[0], weight.shape[0]), float("nan"))
    kernels.multiply(x, kernels.pack(weight), output)
    return output


def operands(num_rows: int, num_columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(num_rows, depth), torch.randn(num_columns, depth)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_match_the_reference(instruction_set: str, shape: tuple[int, int, int]) -> None:
    x, weight = operands(*shape)
    ours = multiply(_native.CpuKernels(1, instruction_set), x, weight)
    assert torch.allclose(ours, multiply(ReferenceKernels(), x, weight), rtol=1e-5, atol=2e-5)


def test_a_row_gets_the_same_bits_alone_in_a_batch_and_with_more_threads(instruction_set: str) -> None:
    x, weight = operands(261, 300, 250)
    together = multiply(_native.CpuKernels(1, instruction_set), x, weight)
    assert torch.equal(multiply(_native.CpuKernels(3, instruction_set), x, weight), together)
    for num_rows in (1, 2, 3, 5, 11, 17, 133):
        part = multiply(_native.CpuKernels(1, instruction_set), x[:num_rows], weight)
        assert torch.equal(part, together[:num_rows]), num_rows


@pytest.mark.parametrize("num_rows", [1, 9, 200])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_a_gated_network_has_the_bits_of_its_products_and_its_gate(
    instruction_set: str, gate: str, num_rows: int
) -> None:
    torch.manual_seed(7)
    x, down = torch.randn(num_rows, 150), torch.randn(70, 205)
    gate_weight, up = torch.randn(205, 150) * 0.1, torch.randn(205, 150) * 0.1
    kernels = _native.CpuKernels(1, instruction_set)
    gated = torch.empty(num_rows, 205)
    getattr(kernels, f"{gate}_multiply")(
        torch.cat((multiply(kernels, x, gate_weight), multiply(kernels, x, up)), dim=1), gated
    )
    expected = multiply(kernels, gated, down)
    for num_threads in (1, 3):
        kernels, wide = _native.CpuKernels(num_threads, instruction_set), torch.zeros(num_rows, 80)
        packed = [kernels.pack(weight) for weight in (gate_weight, up, down)]
        for _ in range(2):  # with scratch memory that was used before
            getattr(kernels, f"{gate}_network")(x, *packed, wide[:, 4:74])
            assert torch.equal(wide[:, 4:74], expected)
        assert not bool(wide[:, :4].any() or wide[:, 74:].any())
    reference, output = ReferenceKernels(), torch.empty(num_rows, 70)
    getattr(reference, f"{gate}_network")(x, *(reference.pack(weight) for weight in (gate_weight, up, down)), output)
    assert torch.allclose(output, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("up", "down", "output", "message"),
    [
        (torch.zeros(5, 8), torch.zeros(3, 4), torch.zeros(2, 3), "one shape"),
        (torch.zeros(4, 9), torch.zeros(3, 4), torch.zeros(2, 3), "one shape"),
        (torch.zeros(4, 8), torch.zeros(3, 5), torch.zeros(2, 3), "as deep as"),
        (torch.zeros(4, 8), torch.zeros(3, 4), torch.zeros(2, 4), "weight's rows as columns"),
        (torch.zeros(4, 8), torch.zeros(3, 4), torch.zeros(3, 3), "input's rows"),
    ],
)
def test_contradictory_operands_of_a_gated_network_are_refused(
    up: torch.Tensor, down: torch.Tensor, output: torch.Tensor, message: str
) -> None:
    kernels = _native.CpuKernels(1)
    gate = kernels.pack(torch.zeros(4, 8))
    with pytest.raises(ValueError, match=message):
        kernels.silu_network(torch.zeros(2, 8), gate, kernels.pack(up), kernels.pack(down), output)


def test_rows_of_a_wider_tensor_are_read_and_written_in_place(instruction_set: str) -> None:
    x, weight = operands(9, 20, 32)
    wide_input, wide_output = torch.randn(9, 50), torch.zeros(9, 40)
    wide_input[:, 3:35] = x
    kernels = _native.CpuKernels(1, instruction_set)
    kernels.multiply(wide_input[:, 3:35], kernels.pack(weight), wide_output[:, 10:30])
    assert torch.equal(wide_output[:, 10:30], multiply(kernels, x, weight))
    assert not bool(wide_output[:, :10].any())
    assert not bool(wide_output[:, 30:].any())


def test_gathered_rows_are_those_that_were_packed(instruction_set: str) -> None:
    _, weight = operands(1, 100, 33)
    kernels = _native.CpuKernels(2, instruction_set)
    rows = torch.tensor([99, 0, 47, 48, 0])
    output = torch.full((5, 33), float("nan"))
    kernels.gather_rows(kernels.pack(weight), rows, output)
    assert torch.equal(output, weight[rows])


def test_a_packed_weight_outlives_the_kernels_and_the_plain_weight(instruction_set: str) -> None:
    x, weight = operands(3, 70, 20)
    expected = multiply(_native.CpuKernels(1, instruction_set), x, weight)
    packed = _native.CpuKernels(1, instruction_set).pack(weight)
    weight.fill_(float("nan"))
    output = torch.empty(3, 70)
    _native.CpuKernels(1, instruction_set).multiply(x, packed, output)
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("x", "weight", "output", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 9), torch.zeros(2, 4), "one depth"),
        (torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(3, 4), "input's rows"),
        (torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(2, 500), "weight's rows as columns"),
        (torch.zeros(8, 2).T, torch.zeros(4, 8), torch.zeros(2, 4), "last axis must be contiguous"),
    ],
)
def test_contradictory_operands_are_refused(
    x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, message: str
) -> None:
    kernels = _native.CpuKernels(1)
    with pytest.raises(ValueError, match=message):
        kernels.multiply(x, kernels.pack(weight), output)


@pytest.mark.skipif(len(_native.instruction_sets()) < 2, reason="this CPU has one instruction set")
def test_a_weight_packed_for_other_kernels_is_refused() -> None:
    first, *_, last = _native.instruction_sets()
    weight = _native.CpuKernels(1, last).pack(torch.zeros(5, 8))
    with pytest.raises(ValueError, match="packed by these kernels"):
        _native.CpuKernels(1, first).multiply(torch.zeros(2, 8), weight, torch.zeros(2, 5))
    with pytest.raises(ValueError, match="packed by these kernels"):
        ReferenceKernels().multiply(torch.zeros(2, 8), weight, torch.zeros(2, 5))


@pytest.mark.parametrize("row", [-1, 4, 4096])
def test_rows_outside_the_packed_weight_are_refused(row: int) -> None:
    for kernels in (_native.CpuKernels(1), ReferenceKernels()):
        with pytest.raises(ValueError, match="row ids"):
            kernels.gather_rows(kernels.pack(torch.zeros(4, 8)), torch.tensor([row]), torch.zeros(1, 8))


def test_no_rows_are_no_work(instruction_set: str) -> None:
    kernels = _native.CpuKernels(2, instruction_set)
    kernels.multiply(torch.zeros(0, 8), kernels.pack(torch.zeros(400, 8)), torch.zeros(0, 400))
