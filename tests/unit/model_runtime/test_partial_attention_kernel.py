"""Attention over some of the pages of a sequence, and the joining of such parts to attention over all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from unit.model_runtime.test_paged_attention_kernel import MIXED, TOLERANCE, Problem, make_problem

from model_runtime.kernels import _native
from model_runtime.kernels.reference import ReferenceKernels
from model_runtime.layers.cached_rows import join_partial_attention

ABSENT = -1
LONG = [(1500, 1), (700, 40), (0, 3), (511, 2)]


@pytest.fixture(params=_native.instruction_sets())
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def solve(problem: Problem, kernel: ReferenceKernels | _native.CpuKernels) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log_sum_exp) over the pages that are present."""
    output = torch.full_like(problem.query, float("nan"))
    log_sum_exp = torch.full(problem.query.shape[:2], float("nan"))
    kernel.attend(
        problem.query,
        problem.key_pages,
        problem.value_pages,
        problem.page_table,
        problem.begins,
        problem.lengths,
        output,
        problem.query.shape[2] ** -0.5,
        problem.window_left_tokens,
        log_sum_exp,
    )
    return output, log_sum_exp


def split(problem: Problem, num_parts: int) -> list[Problem]:
    """Every page in one part, by chance; what a part lacks is poisoned there as well."""
    torch.manual_seed(5)
    owner = torch.randint(num_parts, problem.page_table.shape)
    parts = []
    for part in range(num_parts):
        table = torch.where((owner == part) & (problem.page_table > 0), problem.page_table, ABSENT)
        foreign = torch.ones(problem.key_pages.shape[0], dtype=torch.bool)
        foreign[table[table >= 0].long()] = False
        poison = foreign[:, None, None, None]
        parts.append(
            replace(
                problem,
                page_table=table.to(torch.int32),
                key_pages=problem.key_pages.masked_fill(poison, float("nan")),
                value_pages=problem.value_pages.masked_fill(poison, float("nan")),
            )
        )
    return parts


@pytest.mark.parametrize("spans", [MIXED, LONG])
@pytest.mark.parametrize("num_parts", [2, 3, 7])
@pytest.mark.parametrize("page_tokens", [1, 4, 16, 64, 128])
def test_joined_parts_are_attention_over_everything(
    variant: str, spans: list[tuple[int, int]], num_parts: int, page_tokens: int
) -> None:
    problem = make_problem(spans, page_tokens=page_tokens, head_dim=16)
    kernels = _native.CpuKernels(2, variant)
    outputs, sums = zip(*(solve(part, kernels) for part in split(problem, num_parts)), strict=True)
    difference = join_partial_attention(outputs, sums) - problem.solve(ReferenceKernels())
    assert float(difference.abs().max()) < TOLERANCE


@pytest.mark.parametrize("window_left_tokens", [0, 5, 70, 600])
def test_joined_parts_are_attention_over_the_window(variant: str, window_left_tokens: int) -> None:
    problem = make_problem([*MIXED, *LONG], head_dim=16, window_left_tokens=window_left_tokens)
    kernels = _native.CpuKernels(1, variant)
    outputs, sums = zip(*(solve(part, kernels) for part in split(problem, 2)), strict=True)
    difference = join_partial_attention(outputs, sums) - problem.solve(ReferenceKernels())
    assert float(difference.abs().max()) < TOLERANCE


def test_a_part_and_its_log_sum_exp_match_the_reference(variant: str) -> None:
    for part in split(make_problem([*MIXED, *LONG], page_tokens=4, head_dim=24), 2):
        output, log_sum_exp = solve(part, _native.CpuKernels(2, variant))
        expected, expected_sums = solve(part, ReferenceKernels())
        sees_some = expected_sums.isfinite()
        assert float((output - expected).abs().max()) < TOLERANCE
        assert float((log_sum_exp - expected_sums)[sees_some].abs().max()) < 1e-5
        assert bool((log_sum_exp[~sees_some] == float("-inf")).all())
        assert bool((output[~sees_some] == 0.0).all())
        assert 0 < int((~sees_some).sum()) < sees_some.numel()


def test_with_all_pages_present_the_result_has_the_bits_of_the_usual_one(variant: str) -> None:
    problem = make_problem([*MIXED, *LONG])
    kernels = _native.CpuKernels(2, variant)
    assert torch.equal(solve(problem, kernels)[0], problem.solve(kernels))


def test_a_part_has_the_same_bits_for_every_number_of_threads(variant: str) -> None:
    part = split(make_problem([*MIXED, *LONG], page_tokens=4), 2)[0]
    alone = solve(part, _native.CpuKernels(1, variant))
    shared = solve(part, _native.CpuKernels(3, variant))
    assert torch.equal(alone[0], shared[0])
    assert torch.equal(alone[1], shared[1])


def test_large_scores_are_joined_without_overflow() -> None:
    """exp of either part's sum is beyond float32."""
    problem = make_problem([(40, 1)], page_tokens=4)
    problem = replace(problem, query=problem.query * 400)
    kernels = _native.CpuKernels(1)
    outputs, sums = zip(*(solve(part, kernels) for part in split(problem, 2)), strict=True)
    assert float(torch.stack(sums).amax()) > 100
    joined = join_partial_attention(outputs, sums)
    assert float((joined - problem.solve(ReferenceKernels())).abs().max()) < 1e-3


def test_an_absent_page_is_refused_where_nobody_would_learn_of_it() -> None:
    part = split(make_problem([(40, 1)]), 2)[0]
    assert ABSENT in part.page_table
    with pytest.raises(ValueError, match="row 0 names page -1"):
        part.solve(_native.CpuKernels(1))


@pytest.mark.parametrize("shape", [(4, 6), (5, 5)])
def test_a_log_sum_exp_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    problem = make_problem([(0, 5)])
    with pytest.raises(ValueError, match="one number per token and head"):
        _native.CpuKernels(1).attend(
            problem.query,
            problem.key_pages,
            problem.value_pages,
            problem.page_table,
            problem.begins,
            problem.lengths,
            torch.empty_like(problem.query),
            1.0,
            None,
            torch.empty(shape),
        )
