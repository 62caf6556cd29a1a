"""Quantised weights give the bits of the float32 weights they stand for, in every instruction set this CPU runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from unit.model_runtime.quantized_blocks import SCALE_OFFSETS, plain, random_blocks

from model_runtime.kernels import _native
from model_runtime.kernels.interface import PackedWeight
from model_runtime.kernels.reference import ReferenceKernels

QUANTIZATIONS = tuple(SCALE_OFFSETS)
# One row is computed in another way than several; 131 rows are more than one piece; columns fill panels or do not.
ROW_COUNTS = (1, 2, 7, 8, 33, 131)
COLUMN_COUNTS = (1, 48, 97)


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def product(kernels: _native.CpuKernels, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    output = torch.full((x.shape[0], weight.num_columns), float("nan"))
    kernels.multiply(x, weight, output)
    return output


def inputs(num_rows: int, depth: int) -> torch.Tensor:
    return torch.randn(num_rows, depth, generator=torch.Generator().manual_seed(1))


def test_every_kind_the_kernels_pack_is_tested() -> None:
    assert set(_native.CpuKernels(1).quantizations) == set(QUANTIZATIONS)


@pytest.mark.parametrize("num_columns", COLUMN_COUNTS)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_products_are_those_of_the_float32_weight_bit_for_bit(
    instruction_set: str, quantization: str, num_columns: int
) -> None:
    kernels = _native.CpuKernels(1, instruction_set)
    for depth in (256, 768):
        blocks = random_blocks(quantization, num_columns, depth)
        quantized, expanded = kernels.pack_blocks(blocks, quantization), kernels.pack(plain(blocks, quantization))
        assert (quantized.num_columns, quantized.depth) == (num_columns, depth)
        for num_rows in ROW_COUNTS:
            x = inputs(num_rows, depth)
            assert torch.equal(product(kernels, x, quantized), product(kernels, x, expanded)), (depth, num_rows)


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
@pytest.mark.parametrize("depth", [32, 96, 160])
def test_depths_that_end_within_a_step_are_computed_whole(instruction_set: str, quantization: str, depth: int) -> None:
    kernels = _native.CpuKernels(1, instruction_set)
    blocks = random_blocks(quantization, 50, depth)
    weight = plain(blocks, quantization)
    for num_rows in (1, 3, 9):
        x = inputs(num_rows, depth)
        ours = product(kernels, x, kernels.pack_blocks(blocks, quantization))
        assert torch.equal(ours, product(kernels, x, kernels.pack(weight)))
        assert torch.allclose(ours, x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_gets_the_same_bits_alone_in_a_batch_and_with_more_threads(
    instruction_set: str, quantization: str
) -> None:
    blocks = random_blocks(quantization, 300, 512)
    x = inputs(261, 512)
    alone, several = _native.CpuKernels(1, instruction_set), _native.CpuKernels(3, instruction_set)
    weight = alone.pack_blocks(blocks, quantization)
    together = product(alone, x, weight)
    assert torch.equal(product(several, x, several.pack_blocks(blocks, quantization)), together)
    for begin, end in ((0, 1), (260, 261), (3, 5), (0, 11), (100, 133), (1, 260)):
        assert torch.equal(product(alone, x[begin:end], weight), together[begin:end]), (begin, end)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_gathered_rows_are_those_the_blocks_stand_for(instruction_set: str, quantization: str) -> None:
    kernels = _native.CpuKernels(2, instruction_set)
    blocks = random_blocks(quantization, 100, 256)
    rows = torch.tensor([99, 0, 47, 48, 0])
    output = torch.full((5, 256), float("nan"))
    kernels.gather_rows(kernels.pack_blocks(blocks, quantization), rows, output)
    assert torch.equal(output, plain(blocks, quantization)[rows])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_reference_reads_the_same_blocks(quantization: str) -> None:
    kernels, reference = _native.CpuKernels(1), ReferenceKernels()
    blocks = random_blocks(quantization, 20, 512)
    x = inputs(4, 512)
    expected = torch.empty(4, 20)
    reference.multiply(x, reference.pack_blocks(blocks, quantization), expected)
    ours = product(kernels, x, kernels.pack_blocks(blocks, quantization))
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("quantization", "bits_per_weight"),
    [("Q4_0", 6.0), ("Q4_1", 5.0), ("Q5_0", 8.5), ("Q8_0", 8.5), ("Q4_K", 6.0), ("Q6_K", 10.0)],
)
def test_a_packed_weight_takes_a_fraction_of_float32(quantization: str, bits_per_weight: float) -> None:
    kernels = _native.CpuKernels(1)
    packed = kernels.pack_blocks(random_blocks(quantization, 480, 512), quantization)
    assert packed.num_bytes == 480 * 512 * bits_per_weight / 8
    assert kernels.num_packed_bytes == packed.num_bytes
    kernels.pack(torch.zeros(480, 512))
    assert kernels.num_packed_bytes == packed.num_bytes + 480 * 512 * 4


def test_a_kind_that_cannot_be_packed_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r'quantization "Q2_K" cannot be packed \(can be: Q4_0, Q4_1'):
        _native.CpuKernels(1).pack_blocks(torch.zeros(4, 84, dtype=torch.uint8), "Q2_K")


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        _native.CpuKernels(1).pack_blocks(torch.zeros(4, 35, dtype=torch.uint8), "Q8_0")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_scale_that_is_no_finite_number_is_refused(quantization: str, value: float) -> None:
    blocks = random_blocks(quantization, 60, 256)
    offset = SCALE_OFFSETS[quantization][-1]
    blocks[51, offset : offset + 2] = torch.from_numpy(np.array([value], dtype=np.float16).view(np.uint8))
    with pytest.raises(ValueError, match="row 51 of the weight has a scale that is not finite"):
        _native.CpuKernels(2).pack_blocks(blocks, quantization)
