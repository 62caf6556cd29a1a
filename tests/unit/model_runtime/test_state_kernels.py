"""The native convolution and recurrences against the torch reference, in every instruction set this CPU runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from model_runtime.kernels import _native
from model_runtime.kernels.reference import ReferenceKernels

TOLERANCE = 2e-5
NUM_BLOCKS = 12
AnyKernels = _native.CpuKernels | ReferenceKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One row of a batch: `num_tokens` from `input_block` (-1: from zeros) to `output_block`."""

    num_tokens: int
    input_block: int
    output_block: int
    checkpoint_block: int = -1
    checkpoint_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The inputs of one kernel by name, all with a token axis, and its constants and states."""

    kernel: str
    inputs: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor | float | None]
    states: torch.Tensor
    output_like: str
    changes: dict[str, torch.Tensor] = field(default_factory=dict)

    def tokens(self, begin: int, end: int) -> Problem:
        return replace(self, inputs={name: tensor[begin:end] for name, tensor in self.inputs.items()})

    def run(self, kernels: AnyKernels, spans: Sequence[Span], states: torch.Tensor | None = None) -> torch.Tensor:
        """The output; `states`, by default a copy of the problem's, are changed in place."""
        like = self.inputs[self.output_like]
        output = torch.full_like(like, float("nan"), memory_format=torch.contiguous_format)
        arguments = self.inputs | self.constants | columns(spans) | self.changes
        kept = self.states.clone() if states is None else states
        getattr(kernels, self.kernel)(**({"states": kept, "output": output} | arguments))
        return output


def columns(spans: Sequence[Span]) -> dict[str, torch.Tensor]:
    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return {
        "input_blocks": column([span.input_block for span in spans]),
        "output_blocks": column([span.output_block for span in spans]),
        "checkpoint_blocks": column([span.checkpoint_block for span in spans]),
        "checkpoint_lengths": column([span.checkpoint_length for span in spans]),
        "lengths": column([span.num_tokens for span in spans]),
    }


def conv_problem(num_tokens: int, channels: int = 300, width: int = 4, *, biased: bool = True) -> Problem:
    return Problem(
        kernel="causal_conv",
        inputs={"input": torch.randn(num_tokens, channels)},
        constants={"weight": torch.randn(width, channels), "bias": torch.randn(channels) if biased else None},
        states=torch.randn(NUM_BLOCKS, width - 1, channels),
        output_like="input",
    )


def delta_problem(
    num_tokens: int, *, heads: int = 4, key_heads: int = 2, key_dim: int = 12, value_dim: int = 80, by_row: bool = False
) -> Problem:
    steps = key_dim if by_row else 1
    return Problem(
        kernel="gated_delta_rule",
        inputs={
            "query": torch.randn(num_tokens, key_heads, key_dim),
            "key": torch.randn(num_tokens, key_heads, key_dim),
            "value": torch.randn(num_tokens, heads, value_dim),
            "step": 3 * torch.randn(num_tokens, heads, steps),
            "strength_logits": 3 * torch.randn(num_tokens, heads),
        },
        constants={"step_bias": torch.randn(heads, steps), "rate": torch.rand(heads)},
        states=torch.randn(NUM_BLOCKS, heads, key_dim, value_dim),
        output_like="value",
    )


def scan_problem(
    num_tokens: int, *, heads: int = 4, groups: int = 2, key_dim: int = 12, value_dim: int = 80
) -> Problem:
    return Problem(
        kernel="selective_scan",
        inputs={
            "value": torch.randn(num_tokens, heads, value_dim),
            "key": torch.randn(num_tokens, groups, key_dim),
            "query": torch.randn(num_tokens, groups, key_dim),
            "step": 3 * torch.randn(num_tokens, heads, 1),
        },
        constants={
            "step_bias": torch.randn(heads, 1),
            "rate": torch.rand(heads),
            "skip": torch.randn(heads),
            "min_step": 0.05,
            "max_step": 2.0,
        },
        states=torch.randn(NUM_BLOCKS, heads, key_dim, value_dim),
        output_like="value",
    )


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "convolution": conv_problem,
    "convolution without bias": lambda n: conv_problem(n, channels=7, width=2, biased=False),
    "delta rule": delta_problem,
    "delta rule, one head per key": lambda n: delta_problem(n, key_heads=4, key_dim=5, value_dim=3),
    "delta rule, decay by row": lambda n: delta_problem(n, by_row=True, value_dim=64),
    "selective scan": scan_problem,
    "selective scan, one group": lambda n: scan_problem(n, groups=1, value_dim=130, key_dim=16),
}
RAGGED = [
    Span(num_tokens=5, input_block=-1, output_block=2),
    Span(num_tokens=1, input_block=4, output_block=4),
    Span(num_tokens=9, input_block=6, output_block=8, checkpoint_block=7, checkpoint_length=6),
    Span(num_tokens=2, input_block=-1, output_block=9, checkpoint_block=1, checkpoint_length=1),
]
NUM_RAGGED_TOKENS = sum(span.num_tokens for span in RAGGED)


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PROBLEMS.values(), ids=PROBLEMS.keys())
def make_problem(request: pytest.FixtureRequest) -> Callable[[int], Problem]:
    torch.manual_seed(5)
    result: Callable[[int], Problem] = request.param
    return result


def test_outputs_and_snapshots_of_a_ragged_batch_match_the_reference(
    instruction_set: str, make_problem: Callable[[int], Problem]
) -> None:
    problem = make_problem(NUM_RAGGED_TOKENS)
    ours, theirs = problem.states.clone(), problem.states.clone()
    output = problem.run(_native.CpuKernels(1, instruction_set), RAGGED, ours)
    expected = problem.run(ReferenceKernels(), RAGGED, theirs)
    assert torch.allclose(output, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    written = {block for span in RAGGED for block in (span.output_block, span.checkpoint_block)} - {-1}
    changed = (ours != problem.states).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(changed) == written


def test_a_row_has_the_same_bits_however_it_is_cut_and_whoever_shares_the_batch(
    instruction_set: str, make_problem: Callable[[int], Problem]
) -> None:
    problem = make_problem(20)
    kernels = _native.CpuKernels(1, instruction_set)
    states = problem.states.clone()
    whole = problem.run(kernels, [Span(num_tokens=20, input_block=-1, output_block=1)], states)
    for cuts in ([1] * 20, [7, 13], [19, 1]):
        begin, cut_states = 0, problem.states.clone()
        for length in cuts:
            span = Span(num_tokens=length, input_block=-1 if begin == 0 else 1, output_block=1)
            part = problem.tokens(begin, begin + length).run(kernels, [span], cut_states)
            assert torch.equal(part, whole[begin : begin + length])
            begin += length
        assert torch.equal(cut_states[1], states[1])
    doubled = replace(problem, inputs={name: torch.cat((t[5:], t)) for name, t in problem.inputs.items()})
    shared = [
        Span(num_tokens=15, input_block=3, output_block=4),
        Span(num_tokens=20, input_block=-1, output_block=1, checkpoint_block=2, checkpoint_length=8),
    ]
    assert torch.equal(doubled.run(kernels, shared)[15:], whole)


def test_a_checkpoint_is_the_state_that_a_chunk_up_to_there_leaves(
    instruction_set: str, make_problem: Callable[[int], Problem]
) -> None:
    problem = make_problem(13)
    kernels = _native.CpuKernels(1, instruction_set)
    at_once, step_by_step = problem.states.clone(), problem.states.clone()
    problem.run(
        kernels,
        [Span(num_tokens=13, input_block=5, output_block=7, checkpoint_block=6, checkpoint_length=8)],
        at_once,
    )
    problem.tokens(0, 8).run(kernels, [Span(num_tokens=8, input_block=5, output_block=6)], step_by_step)
    problem.tokens(8, 13).run(kernels, [Span(num_tokens=5, input_block=6, output_block=7)], step_by_step)
    assert torch.equal(at_once, step_by_step)


@pytest.mark.parametrize(
    "make_large",
    [
        lambda: conv_problem(600, 1024),
        lambda: delta_problem(300, value_dim=200),
        lambda: scan_problem(300, value_dim=200),
    ],
    ids=["convolution", "delta rule", "selective scan"],
)
def test_threads_change_no_bit(make_large: Callable[[], Problem]) -> None:
    problem = make_large()
    num_tokens = next(iter(problem.inputs.values())).shape[0]
    spans = [
        Span(num_tokens=num_tokens - 10, input_block=-1, output_block=1),
        Span(num_tokens=10, input_block=2, output_block=2),
    ]
    alone, shared = problem.states.clone(), problem.states.clone()
    assert torch.equal(
        problem.run(_native.CpuKernels(1), spans, alone), problem.run(_native.CpuKernels(3), spans, shared)
    )
    assert torch.equal(alone, shared)


def test_states_of_an_arena_are_read_and_written_in_place(make_problem: Callable[[int], Problem]) -> None:
    problem = make_problem(NUM_RAGGED_TOKENS)
    flat = problem.states.flatten(1)
    arena = torch.zeros(NUM_BLOCKS, flat.shape[1] + 13)
    strided = arena[:, 3 : 3 + flat.shape[1]].unflatten(1, problem.states.shape[1:])
    strided.copy_(problem.states)
    expected = problem.states.clone()
    kernels = _native.CpuKernels(1)
    assert torch.equal(problem.run(kernels, RAGGED, strided), problem.run(kernels, RAGGED, expected))
    assert torch.equal(strided, expected)
    assert not arena[:, :3].any(), "what lies beside a state is somebody else's"
    assert not arena[:, 3 + flat.shape[1] :].any()


def test_heads_of_a_wider_projection_are_read_in_place() -> None:
    torch.manual_seed(6)
    problem = delta_problem(9)
    wide = {
        name: torch.cat((torch.randn_like(tensor), tensor), dim=-1)[..., tensor.shape[-1] :]
        for name, tensor in problem.inputs.items()
        if name != "strength_logits"
    }
    span = [Span(num_tokens=9, input_block=-1, output_block=1)]
    strided = replace(problem, inputs=problem.inputs | wide)
    assert not strided.inputs["value"].is_contiguous()
    kernels = _native.CpuKernels(1)
    assert torch.equal(strided.run(kernels, span), problem.run(kernels, span))


ONE = Span(num_tokens=4, input_block=1, output_block=2)


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (replace(ONE, input_block=0), r"input block 0 of row 0 is outside \[1, 12\)"),
        (replace(ONE, input_block=12), r"input block 12 of row 0 is outside \[1, 12\)"),
        (replace(ONE, output_block=-1), r"output block -1 of row 0 is outside"),
        (replace(ONE, output_block=0), r"output block 0 of row 0 is outside"),
        (replace(ONE, checkpoint_block=12, checkpoint_length=2), r"checkpoint block 12 of row 0 is outside"),
        (replace(ONE, checkpoint_block=3, checkpoint_length=4), "checkpoint length 4 of row 0 is not inside its 4"),
        (replace(ONE, checkpoint_block=3), "checkpoint length 0 of row 0 is not inside"),
        (replace(ONE, checkpoint_length=1), "checkpoint length 1 of row 0 is not inside"),
        (replace(ONE, num_tokens=3), "lengths sum to 3, the tensors hold 4 tokens"),
        (replace(ONE, num_tokens=0), "length of row 0 is 0"),
    ],
)
def test_rows_that_contradict_the_tensors_are_refused_before_anything_is_written(
    make_problem: Callable[[int], Problem], span: Span, message: str
) -> None:
    problem = make_problem(4)
    states = problem.states.clone()
    with pytest.raises(ValueError, match=message):
        problem.run(_native.CpuKernels(1), [span], states)
    assert torch.equal(states, problem.states)


TWO = Span(num_tokens=4, input_block=3, output_block=4)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([ONE, replace(TWO, output_block=2)], "block 2 is written twice, the second time of row 1"),
        ([ONE, replace(TWO, checkpoint_block=2, checkpoint_length=1)], "block 2 is written twice"),
        ([replace(ONE, checkpoint_block=2, checkpoint_length=1), TWO], "block 2 is written twice"),
        ([ONE, replace(TWO, input_block=2)], "input block 2 of row 1 is written by another row"),
        (
            [replace(ONE, input_block=5), replace(TWO, checkpoint_block=5, checkpoint_length=1)],
            "input block 5 of row 0",
        ),
    ],
)
def test_rows_that_would_race_for_a_block_are_refused_before_anything_is_written(
    make_problem: Callable[[int], Problem], spans: list[Span], message: str
) -> None:
    problem = make_problem(8)
    states = problem.states.clone()
    with pytest.raises(ValueError, match=message):
        problem.run(_native.CpuKernels(1), spans, states)
    assert torch.equal(states, problem.states)


def test_rows_may_continue_from_one_snapshot(make_problem: Callable[[int], Problem]) -> None:
    """As prompts do that share a prefix."""
    problem = make_problem(8)
    halves = {name: torch.cat((tensor[:4], tensor[:4])) for name, tensor in problem.inputs.items()}
    twice = replace(problem, inputs=halves)
    output = twice.run(_native.CpuKernels(1), [ONE, replace(TWO, input_block=1)])
    assert torch.equal(output[:4], output[4:])


@pytest.mark.parametrize(
    ("problem", "changes", "message"),
    [
        (conv_problem(4, 8), {"weight": torch.zeros(4, 7)}, "weight must have input's channels"),
        (conv_problem(4, 8), {"weight": torch.zeros(3, 8)}, "the channels of width - 1 tokens"),
        (conv_problem(4, 8), {"bias": torch.zeros(7)}, "bias must have input's channels"),
        (conv_problem(4, 8), {"output": torch.zeros(4, 7)}, "output must have the shape of input"),
        (delta_problem(4), {"key": torch.zeros(4, 2, 11)}, "query and key must have one shape"),
        (delta_problem(4), {"rate": torch.zeros(3)}, "must have value's heads"),
        (delta_problem(4), {"step": torch.zeros(4, 4, 2)}, "one step, or one per key channel"),
        (delta_problem(4), {"strength_logits": torch.zeros(4, 3)}, "one number per token and head"),
        (delta_problem(4), {"states": torch.zeros(NUM_BLOCKS, 4, 80, 12)}, r"\[num_heads, key_dim, value_dim\]"),
        (scan_problem(4), {"skip": torch.zeros(3)}, "skip must have one number per head"),
        (scan_problem(4), {"min_step": 3.0}, "min_step must be in"),
        (scan_problem(4), {"key": torch.zeros(4, 3, 12), "query": torch.zeros(4, 3, 12)}, "multiple of key heads"),
    ],
)
def test_contradictory_shapes_are_refused(problem: Problem, changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(problem, changes=changes).run(_native.CpuKernels(1), [ONE])
