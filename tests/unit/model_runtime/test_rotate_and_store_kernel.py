"""Turning a token's heads and storing its keys and values at once, against the two kernels that do one of it each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from model_runtime.kernels import _native
from model_runtime.kernels.interface import Kernels
from model_runtime.kernels.reference import ReferenceKernels

NUM_HEADS, NUM_KV_HEADS, NUM_LOCATIONS = 4, 2, 300
NUM_ALL = NUM_HEADS + 2 * NUM_KV_HEADS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Arguments of the kernel; the cache rows lie in the midst of wider ones."""

    heads: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor
    locations: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def run(self, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What becomes of heads, keys and values; those given stay as they are."""
        heads, keys, values = self.heads.clone(), self.keys.clone(), self.values.clone()
        cached = slice(1, 1 + NUM_KV_HEADS)
        kernels.rotate_and_store(heads, self.cosines, self.sines, self.locations, keys[:, cached], values[:, cached])
        return heads, keys, values


def drawn(num_tokens: int, head_dim: int, half: int) -> Rows:
    torch.manual_seed(num_tokens + head_dim)
    angles = torch.rand(num_tokens, half) * 6
    return Rows(
        heads=torch.randn(num_tokens, NUM_ALL, head_dim),
        cosines=angles.cos(),
        sines=angles.sin(),
        locations=torch.randperm(NUM_LOCATIONS)[:num_tokens],
        keys=torch.randn(NUM_LOCATIONS, NUM_KV_HEADS + 2, head_dim),
        values=torch.randn(NUM_LOCATIONS, NUM_KV_HEADS + 2, head_dim),
    )


def one_after_the_other(rows: Rows, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, keys, values = rows.heads.clone(), rows.keys.clone(), rows.values.clone()
    turning = heads[:, :-NUM_KV_HEADS, : 2 * rows.cosines.shape[1]]
    turned = torch.empty(turning.shape)
    kernels.rotate(turning.flatten(1), rows.cosines, rows.sines, turned.flatten(1))
    turning.copy_(turned)
    keys[rows.locations, 1 : 1 + NUM_KV_HEADS] = heads[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS]
    values[rows.locations, 1 : 1 + NUM_KV_HEADS] = heads[:, NUM_HEADS + NUM_KV_HEADS :]
    return heads, keys, values


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_same(ours: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (24, 12), (6, 3)])
@pytest.mark.parametrize("num_tokens", [1, 5, 250])
def test_it_has_the_bits_of_turning_and_then_storing(
    instruction_set: str, num_tokens: int, head_dim: int, half: int
) -> None:
    rows = drawn(num_tokens, head_dim, half)
    expected = one_after_the_other(rows, _native.CpuKernels(1, instruction_set))
    assert_same(rows.run(_native.CpuKernels(1, instruction_set)), expected)
    assert_same(rows.run(_native.CpuKernels(3, instruction_set)), expected)
    assert not torch.equal(expected[0], rows.heads)


def test_dimensions_without_an_angle_stay_as_they_are(instruction_set: str) -> None:
    rows = drawn(9, 32, 8)
    expected = one_after_the_other(rows, _native.CpuKernels(1, instruction_set))
    assert_same(rows.run(_native.CpuKernels(1, instruction_set)), expected)
    assert torch.equal(expected[0][..., 16:], rows.heads[..., 16:])


def test_a_token_without_a_place_turns_and_is_not_stored(instruction_set: str) -> None:
    rows = drawn(3, 16, 8)
    kept = torch.tensor([0, 2])
    unplaced = replace(rows, locations=rows.locations.index_fill(0, torch.tensor([1]), -1))
    stored = replace(
        rows, heads=rows.heads[kept], cosines=rows.cosines[kept], sines=rows.sines[kept], locations=rows.locations[kept]
    )
    kernels = _native.CpuKernels(1, instruction_set)
    heads, keys, values = unplaced.run(kernels)
    assert torch.equal(heads, rows.run(kernels)[0])
    assert_same((keys, values), stored.run(kernels)[1:])


@pytest.mark.parametrize("half", [8, 3])
def test_the_reference_does_the_same(half: int) -> None:
    rows = drawn(6, 16, half)
    rows = replace(rows, locations=rows.locations.index_fill(0, torch.tensor([4]), -1))
    for ours, reference in zip(rows.run(_native.CpuKernels(1)), rows.run(ReferenceKernels()), strict=True):
        assert torch.allclose(ours, reference, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"locations": torch.tensor([0, 1, -2])}, "locations must name rows of the cache"),
        ({"locations": torch.tensor([0, NUM_LOCATIONS, 1])}, "locations must name rows of the cache"),
        ({"locations": torch.tensor([0, 1])}, "one location per row"),
        ({"cosines": torch.zeros(2, 8)}, "one row per row"),
        ({"cosines": torch.zeros(3, 9), "sines": torch.zeros(3, 9)}, "more angles than dimensions"),
        ({"heads": torch.zeros(3, 3, 16)}, "must hold those of query, key and value"),
        ({"heads": torch.zeros(3, NUM_ALL, 32)[..., ::2]}, "heads must be contiguous"),
        ({"values": torch.zeros(NUM_LOCATIONS + 1, NUM_KV_HEADS + 2, 16)}, "must have one shape"),
        ({"values": torch.zeros(NUM_LOCATIONS, NUM_KV_HEADS + 2, 18)}, "heads of head_dim"),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_changes(
    change: dict[str, torch.Tensor], complaint: str
) -> None:
    rows = replace(drawn(3, 16, 8), **change)
    heads, keys = rows.heads.clone(), rows.keys.clone()
    with pytest.raises(ValueError, match=complaint):
        _native.CpuKernels(1).rotate_and_store(
            rows.heads, rows.cosines, rows.sines, rows.locations, rows.keys[:, 1:3], rows.values[:, 1:3]
        )
    assert torch.equal(heads, rows.heads)
    assert torch.equal(keys, rows.keys)
