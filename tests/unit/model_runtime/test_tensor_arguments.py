"""What the native kernels accept as tensors: views of torch's own memory, and nothing they would misread."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_runtime.kernels import _native

ROWS, WIDTH = 3, 8


def norm(x: object, weight: object, output: object) -> None:
    _native.CpuKernels(1).rms_norm(x, weight, 1e-5, output)  # type: ignore[arg-type]


def test_a_tensor_is_read_and_written_in_place_wherever_its_storage_begins() -> None:
    storage = torch.randn(ROWS, 3 * WIDTH)
    x, output = storage[:, WIDTH : 2 * WIDTH], storage[:, 2 * WIDTH :]
    before, expected = storage.clone(), torch.empty(ROWS, WIDTH)
    norm(x.clone(), torch.ones(WIDTH), expected)
    norm(x, torch.ones(WIDTH), output)
    assert torch.equal(output, expected)
    assert torch.equal(storage[:, : 2 * WIDTH], before[:, : 2 * WIDTH])


def test_a_parameter_is_a_tensor() -> None:
    x, by_parameter, by_tensor = torch.randn(ROWS, WIDTH), torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
    weight = torch.rand(WIDTH)
    norm(x, torch.nn.Parameter(weight, requires_grad=False), by_parameter)
    norm(x, weight, by_tensor)
    assert torch.equal(by_parameter, by_tensor)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(ROWS, WIDTH, dtype=torch.float64),
        torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16),
        torch.zeros(ROWS, WIDTH, dtype=torch.int32),
        torch.zeros(ROWS * WIDTH),
        torch.zeros(1, ROWS, WIDTH),
        torch.zeros(ROWS, WIDTH, device="meta"),
        np.zeros((ROWS, WIDTH), dtype=np.float32),
        [[0.0] * WIDTH] * ROWS,
        None,
    ],
    ids=["float64", "bfloat16", "int32", "1-d", "3-d", "meta", "numpy", "list", "none"],
)
def test_what_is_no_float32_matrix_of_this_device_is_refused(x: object) -> None:
    output = torch.full((ROWS, WIDTH), 7.0)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        norm(x, torch.ones(WIDTH), output)
    assert bool((output == 7.0).all())


def test_a_tensor_with_gaps_is_refused_where_there_must_be_none() -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        norm(torch.zeros(ROWS, WIDTH), torch.ones(2 * WIDTH)[::2], torch.zeros(ROWS, WIDTH))
