"""Rows that kernels leave at given places of a buffer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model_runtime.kernels import _native
from model_runtime.kernels.interface import Kernels
from model_runtime.kernels.reference import ReferenceKernels
from model_runtime.registry import torch_backend

MAKERS: dict[str, Callable[[], Kernels]] = {
    "native": lambda: _native.CpuKernels(2),
    "reference": ReferenceKernels,
    "torch": lambda: torch_backend(torch.device("cpu")).kernels,
}


@pytest.fixture(params=MAKERS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return MAKERS[request.param]()


@pytest.mark.parametrize("row_shape", [(5,), (3, 4)])
def test_rows_lie_where_they_were_sent_and_nothing_else_changes(kernels: Kernels, row_shape: tuple[int, ...]) -> None:
    rows = torch.randn(4, *row_shape)
    buffer = torch.randn(9, *row_shape)
    expected = buffer.clone()
    locations = torch.tensor([7, 0, 8, 3])
    expected[locations] = rows
    kernels.store_rows(rows, locations, buffer)
    assert torch.equal(buffer, expected)


def test_rows_are_read_from_and_written_to_the_midst_of_wider_ones(kernels: Kernels) -> None:
    heads, field = torch.randn(3, 7, 4), torch.zeros(6, 5, 4)
    kernels.store_rows(heads[:, 2:4], torch.tensor([5, 1, 2]), field[:, 1:3])
    assert torch.equal(field[[5, 1, 2], 1:3], heads[:, 2:4])
    assert not bool(field[:, [0, 3, 4]].any())
    assert not bool(field[[0, 3, 4]].any())


def test_of_two_rows_at_one_place_the_later_one_stays(kernels: Kernels) -> None:
    rows, buffer = torch.randn(3, 2), torch.zeros(2, 2)
    kernels.store_rows(rows, torch.tensor([0, 0, 0]), buffer)
    assert torch.equal(buffer[0], rows[2])


def test_no_rows_change_nothing(kernels: Kernels) -> None:
    buffer = torch.ones(2, 3)
    kernels.store_rows(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), buffer)
    assert torch.equal(buffer, torch.ones(2, 3))


@pytest.mark.parametrize("maker", ["native", "reference"])
@pytest.mark.parametrize("location", [-1, 4])
def test_a_location_outside_the_buffer_is_refused_before_anything_is_written(maker: str, location: int) -> None:
    buffer = torch.zeros(4, 2)
    with pytest.raises(ValueError, match="locations must name rows of buffer"):
        MAKERS[maker]().store_rows(torch.ones(2, 2), torch.tensor([1, location]), buffer)
    assert not bool(buffer.any())


@pytest.mark.parametrize(
    ("rows", "num_locations", "complaint"),
    [
        (torch.zeros(2, 3), 2, "rows of the same shape"),
        (torch.zeros(3, 2), 2, "one location per row"),
        (torch.zeros(2, 4)[:, ::2], 2, "must be contiguous"),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(rows: torch.Tensor, num_locations: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        _native.CpuKernels(1).store_rows(rows, torch.zeros(num_locations, dtype=torch.int64), torch.zeros(4, 2))
