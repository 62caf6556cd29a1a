"""One request on a decode node: the engine's updates become batches of tokens, and every end is told once."""

from __future__ import annotations

import pytest

from decode_node.generation import Generation, Measured
from model_runtime.sampler import SampledToken, SamplingParams
from node_runtime.engine.messages import (
    Command,
    EndReason,
    GenerationEnded,
    GrantOffered,
    PostEvents,
    RequestAdmitted,
    RequestFailed,
    SubmitRequest,
    TokenGenerated,
    Update,
)
from node_runtime.errors import InternalError
from node_runtime.wire.decode import DecodeJob
from scheduler_core import AbortEvent


class InboxOnly:
    """Stands for an engine that does nothing by itself."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def post(self, command: Command) -> None:
        self.commands.append(command)

    def tell(self, *updates: Update) -> None:
        (submitted,) = [command for command in self.commands if isinstance(command, SubmitRequest)]
        for update in updates:
            submitted.sink(update)

    def num_aborts(self) -> int:
        posted = [event for command in self.commands if isinstance(command, PostEvents) for event in command.events]
        return sum(isinstance(event, AbortEvent) for event in posted)


JOB = DecodeJob(
    request_id="r",
    token_ids=(1, 2, 3),
    sampling=SamplingParams(),
    max_tokens=5,
    stop_token_ids=frozenset({9}),
    extra_keys=(b"salt",),
)
ENDED = GenerationEnded(reason=EndReason.LENGTH, matched_token_id=None, at_s=9.0)


def token(token_id: int, at_s: float = 2.0) -> TokenGenerated:
    return TokenGenerated(token=SampledToken(token_id=token_id), at_s=at_s)


@pytest.fixture
def engine() -> InboxOnly:
    return InboxOnly()


@pytest.fixture
def generation(engine: InboxOnly) -> Generation:
    made = Generation(engine_id="r#1", job=JOB, engine=engine, measured=Measured(arrived_at_s=1.0))
    made.submit()
    return made


async def collect(generation: Generation) -> list[tuple[list[int], bool]]:
    return [([item.token_id for item in tokens], ended is not None) async for tokens, ended in generation.batches()]


def test_the_engine_gets_the_whole_job_under_a_name_of_its_own(engine: InboxOnly, generation: Generation) -> None:
    (command,) = engine.commands
    assert isinstance(command, SubmitRequest)
    assert command.spec.request_id == "r#1"
    assert command.spec.tokens.tolist() == [1, 2, 3]
    assert command.spec.max_new_tokens == 5
    assert command.stop is not None
    assert (command.stop.max_new_tokens, command.stop.stop_token_ids) == (5, frozenset({9}))


async def test_tokens_that_came_together_leave_together_and_the_last_with_the_end(
    engine: InboxOnly, generation: Generation
) -> None:
    engine.tell(token(4), token(5, at_s=3.0), ENDED)
    assert await collect(generation) == [([4, 5], True)]
    assert (generation.measured.first_token_at_s, generation.measured.last_token_at_s) == (2.0, 3.0)
    assert generation.measured.num_tokens == 2


async def test_a_failure_is_raised_and_told_to_the_handoff(engine: InboxOnly, generation: Generation) -> None:
    told = []
    generation.on_failure = told.append
    error = InternalError("the forward pass failed")
    engine.tell(RequestFailed(error=error))
    with pytest.raises(InternalError):
        await collect(generation)
    assert told == [error]


def test_admission_ends_the_wait_and_counts_the_hits(engine: InboxOnly, generation: Generation) -> None:
    assert generation.measured.admitted_at_s is None
    engine.tell(RequestAdmitted(device_hit_tokens=8, host_hit_tokens=0, storage_hit_tokens=0, at_s=1.5))
    assert generation.measured.admitted_at_s == 1.5
    assert generation.measured.device_hit_tokens == 8


def test_a_grant_goes_to_the_handoff(engine: InboxOnly, generation: Generation) -> None:
    offers = []
    generation.on_grant = offers.append
    offer = GrantOffered(from_token=0, groups=(), at_s=1.5)
    engine.tell(offer)
    assert offers == [offer]


def test_aborting_is_told_to_the_engine_once_and_never_after_the_end(engine: InboxOnly, generation: Generation) -> None:
    generation.abort()
    generation.abort()
    assert engine.num_aborts() == 1
    other_engine = InboxOnly()
    ended = Generation(engine_id="r#2", job=JOB, engine=other_engine, measured=Measured(arrived_at_s=1.0))
    ended.submit()
    other_engine.tell(token(1), ENDED)
    ended.abort()
    assert other_engine.num_aborts() == 0


async def test_what_a_slow_reader_is_behind_with_comes_in_batches_that_fit_a_message(
    engine: InboxOnly, generation: Generation
) -> None:
    engine.tell(*(token(number) for number in range(1000)), ENDED)
    batches = await collect(generation)
    assert [number for numbers, _ in batches for number in numbers] == list(range(1000))
    assert max(len(numbers) for numbers, _ in batches) == 256
    assert [is_last for _, is_last in batches] == [False] * (len(batches) - 1) + [True]
