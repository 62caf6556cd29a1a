"""Where the largest number of a row is, as numpy finds it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_runtime.kernels import _native
from model_runtime.kernels.interface import Kernels
from model_runtime.kernels.reference import ReferenceKernels

KERNELS: dict[str, Kernels] = {
    "reference": ReferenceKernels(),
    **{name: _native.CpuKernels(2, name) for name in _native.instruction_sets()},
}


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return KERNELS[request.param]


def assert_found(kernels: Kernels, rows: torch.Tensor) -> None:
    places = torch.full((rows.shape[0],), -9)
    kernels.find_largest(rows, places)
    assert places.tolist() == np.argmax(rows.numpy(), axis=1).tolist()


@pytest.mark.parametrize("width", [1, 3, 16, 37, 5000])
def test_the_largest_is_found_wherever_it_is_and_the_first_among_equals(kernels: Kernels, width: int) -> None:
    torch.manual_seed(width)
    assert_found(kernels, torch.randn(40, width))
    assert_found(kernels, torch.randint(-3, 3, (40, width)).float())
    assert_found(kernels, torch.randn(7, width + 5)[:, 2:-3])


def test_rows_without_a_finite_maximum_are_as_in_numpy(kernels: Kernels) -> None:
    inf, nan = float("inf"), float("nan")
    assert_found(kernels, torch.full((2, 50), -inf))
    rows = torch.randn(5, 50)
    rows[0, 20], rows[1, 49], rows[2, [7, 30]] = inf, nan, nan
    rows[3, 0], rows[4, 10:12] = nan, inf
    assert_found(kernels, rows)


def test_no_rows_are_no_work_and_rows_of_nothing_are_refused(kernels: Kernels) -> None:
    for nothing in (torch.zeros(0, 4), torch.zeros(4, 0).T):
        assert_found(kernels, nothing)
    with pytest.raises(ValueError, match="empty"):
        kernels.find_largest(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64))
