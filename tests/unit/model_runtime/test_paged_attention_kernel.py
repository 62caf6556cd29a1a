"""The native attention kernel against the torch reference, in every instruction set this CPU runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from model_runtime.kernels import _native
from model_runtime.kernels.reference import ReferenceKernels

# float32 softmax and sums against float64; values are of unit scale.
TOLERANCE = 3e-6
NUM_HEADS = 6
NUM_KV_HEADS = 2
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    query: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    page_table: torch.Tensor
    begins: torch.Tensor
    lengths: torch.Tensor
    window_left_tokens: int | None = None

    def solve(self, kernel: ReferenceKernels | _native.CpuKernels) -> torch.Tensor:
        output = torch.full_like(self.query, float("nan"))
        kernel.attend(
            self.query,
            self.key_pages,
            self.value_pages,
            self.page_table,
            self.begins,
            self.lengths,
            output,
            self.query.shape[2] ** -0.5,
            self.window_left_tokens,
        )
        return output


def make_problem(
    spans: list[tuple[int, int]],
    *,
    num_heads: int = NUM_HEADS,
    num_kv_heads: int = NUM_KV_HEADS,
    head_dim: int = 64,
    page_tokens: int = PAGE_TOKENS,
    window_left_tokens: int | None = None,
) -> Problem:
    """One row per (begin, length); pages are scattered and page 0, the dummy, is poisoned.

    With a window, pages that no token of a row sees are the dummy, as in the table of a group whose blocks expire.
    """
    torch.manual_seed(11)
    begins = torch.tensor([begin for begin, _ in spans], dtype=torch.int32)
    lengths = torch.tensor([length for _, length in spans], dtype=torch.int32)
    pages_per_row = (begins + lengths + page_tokens - 1) // page_tokens
    max_pages = int(pages_per_row.max())
    num_pages = len(spans) * max_pages + 1
    page_table = (torch.randperm(num_pages - 1) + 1).reshape(len(spans), max_pages).to(torch.int32)
    for row, pages in enumerate(pages_per_row.tolist()):
        page_table[row, pages:] = 0
        if window_left_tokens is not None:
            page_table[row, : max(0, int(begins[row]) - window_left_tokens) // page_tokens] = 0
    pages_shape = (num_pages, page_tokens, num_kv_heads, head_dim)
    key_pages, value_pages = torch.randn(pages_shape), torch.randn(pages_shape)
    key_pages[0] = value_pages[0] = float("nan")
    return Problem(
        query=torch.randn(int(lengths.sum()), num_heads, head_dim),
        key_pages=key_pages,
        value_pages=value_pages,
        page_table=page_table,
        begins=begins,
        lengths=lengths,
        window_left_tokens=window_left_tokens,
    )


@pytest.fixture(params=_native.instruction_sets())
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


MIXED = [(0, 1), (5, 1), (63, 1), (64, 1), (300, 1), (0, 65), (100, 50), (0, 3)]


@pytest.mark.parametrize("page_tokens", [1, 7, 16, 64, 128])
def test_prefill_and_decode_rows_match_the_reference_for_every_page_size(variant: str, page_tokens: int) -> None:
    problem = make_problem(MIXED, page_tokens=page_tokens)
    ours = problem.solve(_native.CpuKernels(2, variant))
    assert float((ours - problem.solve(ReferenceKernels())).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 2), (4, 4, 8), (8, 2, 16), (5, 1, 24), (9, 3, 64), (4, 1, 80), (4, 2, 128), (4, 1, 256)],
)
def test_head_shapes_match_the_reference(variant: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    problem = make_problem(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    ours = problem.solve(_native.CpuKernels(1, variant))
    assert float((ours - problem.solve(ReferenceKernels())).abs().max()) < TOLERANCE


def test_large_scores_neither_overflow_nor_lose_the_largest(variant: str) -> None:
    problem = make_problem([(70, 1), (0, 40)])
    problem = replace(problem, query=problem.query * 300)
    ours = problem.solve(_native.CpuKernels(1, variant))
    assert float((ours - problem.solve(ReferenceKernels())).abs().max()) < 1e-4


def test_a_row_gets_the_same_bits_alone_in_a_batch_and_with_more_threads(variant: str) -> None:
    batch = make_problem(MIXED)
    together = batch.solve(_native.CpuKernels(3, variant))
    assert torch.equal(together, batch.solve(_native.CpuKernels(1, variant)))
    end = 0
    for row, length in enumerate(batch.lengths.tolist()):
        begin, end = end, end + length
        one = slice(row, row + 1)
        alone = replace(
            batch,
            query=batch.query[begin:end],
            page_table=batch.page_table[one],
            begins=batch.begins[one],
            lengths=batch.lengths[one],
        )
        assert torch.equal(alone.solve(_native.CpuKernels(1, variant)), together[begin:end])


@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 64])
def test_a_prompt_gets_the_same_bits_however_it_is_cut_into_chunks(variant: str, chunk_tokens: int) -> None:
    whole = make_problem([(0, 150)])
    expected = whole.solve(_native.CpuKernels(1, variant))
    for begin in range(0, 150, chunk_tokens):
        end = min(begin + chunk_tokens, 150)
        chunk = replace(
            whole,
            query=whole.query[begin:end],
            begins=torch.tensor([begin], dtype=torch.int32),
            lengths=torch.tensor([end - begin], dtype=torch.int32),
        )
        assert torch.equal(chunk.solve(_native.CpuKernels(1, variant)), expected[begin:end])


# Histories are attended to in parts of 512 positions: rows that end before, at and behind the seams between them.
LONG = [(511, 1), (512, 1), (513, 1), (1023, 1), (1700, 1), (500, 30), (1000, 40), (0, 3)]


@pytest.mark.parametrize("head_dim", [64, 24])
def test_long_histories_match_the_reference(variant: str, head_dim: int) -> None:
    problem = make_problem(LONG, head_dim=head_dim)
    ours = problem.solve(_native.CpuKernels(2, variant))
    assert float((ours - problem.solve(ReferenceKernels())).abs().max()) < TOLERANCE


def test_the_parts_of_a_long_history_are_joined_in_order_whoever_computes_them(variant: str) -> None:
    problem = make_problem(LONG)
    expected = problem.solve(_native.CpuKernels(1, variant))
    for num_threads in (2, 5):
        kernel = _native.CpuKernels(num_threads, variant)
        for _ in range(3):
            assert torch.equal(problem.solve(kernel), expected)


@pytest.mark.parametrize("chunk_tokens", [1, 100, 512])
def test_a_long_prompt_gets_the_same_bits_however_it_is_cut_into_chunks(variant: str, chunk_tokens: int) -> None:
    whole = make_problem([(0, 1100)])
    expected = whole.solve(_native.CpuKernels(2, variant))
    # Single tokens are shared out by parts, which whole chunks never are: around the seams is enough of them.
    begins = range(0, 1100, chunk_tokens) if chunk_tokens > 1 else (0, 510, 511, 512, 513, 1023, 1024, 1099)
    for begin in begins:
        end = min(begin + chunk_tokens, 1100)
        chunk = replace(
            whole,
            query=whole.query[begin:end],
            begins=torch.tensor([begin], dtype=torch.int32),
            lengths=torch.tensor([end - begin], dtype=torch.int32),
        )
        assert torch.equal(chunk.solve(_native.CpuKernels(2, variant)), expected[begin:end]), begin


def test_heads_are_read_out_of_a_wider_tensor_without_a_copy(variant: str) -> None:
    problem = make_problem([(10, 4)])
    wide = torch.randn(4, NUM_HEADS + 3, 64)
    strided = replace(problem, query=wide[:, 1 : NUM_HEADS + 1])
    packed = replace(problem, query=wide[:, 1 : NUM_HEADS + 1].contiguous())
    kernel = _native.CpuKernels(1, variant)
    assert torch.equal(strided.solve(kernel), packed.solve(kernel))


WINDOWS = [0, 1, 15, 63, 64, 65, 100, 1000]


@pytest.mark.parametrize("window_left_tokens", WINDOWS)
@pytest.mark.parametrize("page_tokens", [1, 7, 16, 64])
def test_a_window_hides_older_tokens_and_never_reads_the_pages_of_expired_ones(
    variant: str, page_tokens: int, window_left_tokens: int
) -> None:
    problem = make_problem(MIXED, page_tokens=page_tokens, window_left_tokens=window_left_tokens)
    ours = problem.solve(_native.CpuKernels(2, variant))
    assert float((ours - problem.solve(ReferenceKernels())).abs().max()) < TOLERANCE


LONG = [(1500, 1), (1030, 1), (500, 40), (1024, 17), (511, 2), (2000, 1)]


@pytest.mark.parametrize("window_left_tokens", [0, 10, 511, 512, 600, 1100])
def test_a_window_over_a_long_history_skips_what_it_hides_and_has_the_same_bits_for_any_number_of_threads(
    variant: str, window_left_tokens: int
) -> None:
    problem = make_problem(LONG, window_left_tokens=window_left_tokens)
    ours = problem.solve(_native.CpuKernels(1, variant))
    assert float((ours - problem.solve(ReferenceKernels())).abs().max()) < TOLERANCE
    assert torch.equal(ours, problem.solve(_native.CpuKernels(3, variant)))


@pytest.mark.parametrize("window_left_tokens", [10, 511, 700])
def test_a_token_of_a_long_windowed_prompt_has_the_bits_that_it_has_when_it_is_decoded(
    variant: str, window_left_tokens: int
) -> None:
    whole = make_problem([(1000, 60)], window_left_tokens=window_left_tokens)
    expected = whole.solve(_native.CpuKernels(2, variant))
    for token in range(0, 60, 7):
        alone = replace(
            whole,
            query=whole.query[token : token + 1],
            begins=torch.tensor([1000 + token], dtype=torch.int32),
            lengths=torch.tensor([1], dtype=torch.int32),
        )
        assert torch.equal(alone.solve(_native.CpuKernels(2, variant)), expected[token : token + 1])


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 6), (5, 1, 24), (4, 1, 256)])
def test_head_shapes_match_the_reference_under_a_window(
    variant: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    problem = make_problem(
        MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, window_left_tokens=20
    )
    ours = problem.solve(_native.CpuKernels(1, variant))
    assert float((ours - problem.solve(ReferenceKernels())).abs().max()) < TOLERANCE


def test_a_window_wider_than_the_history_gives_the_bits_of_full_visibility(variant: str) -> None:
    problem = make_problem(MIXED)
    kernel = _native.CpuKernels(1, variant)
    assert torch.equal(replace(problem, window_left_tokens=301).solve(kernel), problem.solve(kernel))
    assert not torch.equal(replace(problem, window_left_tokens=60).solve(kernel), problem.solve(kernel))


def test_a_window_of_one_token_returns_the_values_of_the_tokens_themselves(variant: str) -> None:
    problem = make_problem([(20, 3)], num_heads=1, num_kv_heads=1, window_left_tokens=0)
    pages, offsets = torch.arange(20, 23) // PAGE_TOKENS, torch.arange(20, 23) % PAGE_TOKENS
    own = problem.value_pages[problem.page_table[0, pages].long(), offsets]
    assert float((problem.solve(_native.CpuKernels(1, variant)) - own).abs().max()) < TOLERANCE


@pytest.mark.parametrize("window_left_tokens", [3, 40, 64, 90])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 64])
def test_a_windowed_prompt_gets_the_same_bits_however_it_is_cut_into_chunks(
    variant: str, chunk_tokens: int, window_left_tokens: int
) -> None:
    whole = make_problem([(0, 150)], window_left_tokens=window_left_tokens)
    expected = whole.solve(_native.CpuKernels(2, variant))
    for begin in range(0, 150, chunk_tokens):
        end = min(begin + chunk_tokens, 150)
        table = whole.page_table.clone()
        table[:, : max(0, begin - window_left_tokens) // PAGE_TOKENS] = 0
        chunk = replace(
            whole,
            query=whole.query[begin:end],
            page_table=table,
            begins=torch.tensor([begin], dtype=torch.int32),
            lengths=torch.tensor([end - begin], dtype=torch.int32),
        )
        assert torch.equal(chunk.solve(_native.CpuKernels(1, variant)), expected[begin:end])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_table": torch.tensor([[1, 99]], dtype=torch.int32)}, "names page 99, the cache has 3"),
        ({"page_table": torch.tensor([[1, -1]], dtype=torch.int32)}, "names page -1"),
        ({"page_table": torch.tensor([[1]], dtype=torch.int32)}, "needs 2 pages, its table has 1"),
        ({"begins": torch.tensor([-1], dtype=torch.int32)}, "begin -1"),
        ({"lengths": torch.tensor([0], dtype=torch.int32)}, "length 0"),
        ({"window_left_tokens": -1}, "window_left_tokens must not be negative"),
        ({"lengths": torch.tensor([2], dtype=torch.int32)}, "lengths sum to 2, query has 4"),
        ({"lengths": torch.tensor([4, 4], dtype=torch.int32)}, "one row count"),
        ({"query": torch.zeros(4, 5, 64)}, "num_heads 5 is no multiple of num_kv_heads 2"),
        ({"query": torch.zeros(4, 6, 32)}, "one head_dim"),
        ({"value_pages": torch.zeros(9, PAGE_TOKENS, 2, 64)}, "one shape"),
    ],
)
def test_contradictory_arguments_are_refused_and_write_nothing(change: dict[str, object], message: str) -> None:
    problem = replace(make_problem([(14, 4)]), **change)
    output = torch.zeros_like(problem.query)
    kernel = _native.CpuKernels(1)
    with pytest.raises(ValueError, match=message):
        kernel.attend(
            problem.query,
            problem.key_pages,
            problem.value_pages,
            problem.page_table,
            problem.begins,
            problem.lengths,
            output,
            1.0,
            problem.window_left_tokens,
        )
    assert not bool(output.any())


def test_a_tensor_of_another_dtype_is_refused_instead_of_converted() -> None:
    problem = make_problem([(14, 4)])
    with pytest.raises(TypeError):
        replace(problem, key_pages=problem.key_pages.double()).solve(_native.CpuKernels(1))


@pytest.mark.parametrize("num_threads", [0, -1])
def test_a_kernel_without_threads_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match="num_threads must be at least 1"):
        _native.CpuKernels(num_threads)


def test_an_instruction_set_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match='"avx9" does not run'):
        _native.CpuKernels(1, "avx9")
