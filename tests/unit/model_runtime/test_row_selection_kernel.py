"""The native choice of rows against the torch reference, in every instruction set this CPU runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from model_runtime.kernels import _native
from model_runtime.kernels.reference import ReferenceKernels

AnyKernels = _native.CpuKernels | ReferenceKernels
NUM_SELECTED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Rows of (begin, length) whose pages are scattered."""

    query: torch.Tensor
    weights: torch.Tensor
    key_pages: torch.Tensor
    page_table: torch.Tensor
    begins: torch.Tensor
    lengths: torch.Tensor

    def run(self, kernels: AnyKernels, num_selected: int = NUM_SELECTED) -> torch.Tensor:
        selected = torch.full((self.query.shape[0], num_selected), 99, dtype=torch.int32)
        kernels.select_rows(
            self.query, self.weights, self.key_pages, self.page_table, self.begins, self.lengths, selected
        )
        return selected


def make_problem(spans: list[tuple[int, int]], *, head_dim: int = 20, num_heads: int = 5, page: int = 4) -> Problem:
    torch.manual_seed(11)
    num_tokens = sum(length for _, length in spans)
    max_pages = max(-(-(begin + length) // page) for begin, length in spans)
    order = torch.randperm(max_pages * len(spans)) + 1
    return Problem(
        query=torch.randn(num_tokens, num_heads, head_dim),
        weights=torch.randn(num_tokens, num_heads),
        key_pages=torch.randn(max_pages * len(spans) + 1, page, head_dim),
        page_table=order.view(len(spans), max_pages).int(),
        begins=torch.tensor([begin for begin, _ in spans], dtype=torch.int32),
        lengths=torch.tensor([length for _, length in spans], dtype=torch.int32),
    )


RAGGED = [(0, 9), (33, 1), (5, 4), (0, 1)]


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("head_dim", "num_heads"), [(20, 5), (16, 1), (3, 7), (128, 2)])
def test_choices_of_a_ragged_batch_match_the_reference(instruction_set: str, head_dim: int, num_heads: int) -> None:
    problem = make_problem(RAGGED, head_dim=head_dim, num_heads=num_heads)
    ours = problem.run(_native.CpuKernels(1, instruction_set))
    assert torch.equal(ours, problem.run(ReferenceKernels()))
    assert ours[0].tolist() == [0, -1, -1, -1, -1, -1]
    assert len(set(map(tuple, ours.tolist()))) > 8, "tokens choose differently"


def test_of_equals_the_earlier_positions_are_chosen(instruction_set: str) -> None:
    problem = make_problem([(0, 12)])
    all_equal = replace(problem, key_pages=torch.ones_like(problem.key_pages))
    chosen = all_equal.run(_native.CpuKernels(1, instruction_set))
    assert chosen[-1].tolist() == [0, 1, 2, 3, 4, 5]
    worthless = replace(problem, weights=torch.zeros_like(problem.weights))
    assert worthless.run(_native.CpuKernels(1, instruction_set))[-1].tolist() == [0, 1, 2, 3, 4, 5]


def test_keys_that_are_no_numbers_are_chosen_last(instruction_set: str) -> None:
    problem = make_problem([(0, 8)])
    problem.key_pages[problem.page_table[0, 0], 1] = float("nan")
    assert 1 not in problem.run(_native.CpuKernels(1, instruction_set))[-1].tolist()


def test_choices_do_not_depend_on_chunks_batch_or_threads() -> None:
    problem = make_problem([(0, 70), (20, 50)], head_dim=64, num_heads=8)
    together = problem.run(_native.CpuKernels(1))
    assert torch.equal(problem.run(_native.CpuKernels(3)), together)
    for token in (3, 41, 69):
        alone = replace(
            problem,
            query=problem.query[token : token + 1],
            weights=problem.weights[token : token + 1],
            page_table=problem.page_table[:1],
            begins=torch.tensor([token], dtype=torch.int32),
            lengths=torch.tensor([1], dtype=torch.int32),
        )
        assert torch.equal(alone.run(_native.CpuKernels(1)), together[token : token + 1])


def test_more_places_than_positions_are_filled_with_none(instruction_set: str) -> None:
    chosen = make_problem([(3, 2)]).run(_native.CpuKernels(1, instruction_set), num_selected=8)
    assert chosen.tolist() == [[0, 1, 2, 3, -1, -1, -1, -1], [0, 1, 2, 3, 4, -1, -1, -1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": torch.zeros(15, 4)}, "one number per token and head"),
        ({"key_pages": torch.zeros(5, 4, 19)}, "one head_dim"),
        ({"begins": torch.zeros(3, dtype=torch.int32)}, "one row count"),
        ({"page_table": torch.full((4, 9), 1000, dtype=torch.int32)}, "page"),
        ({"lengths": torch.tensor([9, 1, 4, 2], dtype=torch.int32)}, "lengths"),
    ],
)
def test_contradictory_operands_are_refused_before_anything_is_written(
    changes: dict[str, torch.Tensor], message: str
) -> None:
    problem = replace(make_problem(RAGGED), **changes)
    selected = torch.full((problem.query.shape[0], NUM_SELECTED), 99, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        _native.CpuKernels(1).select_rows(
            problem.query,
            problem.weights,
            problem.key_pages,
            problem.page_table,
            problem.begins,
            problem.lengths,
            selected,
        )
    assert bool((selected == 99).all())
