"""The load of `pdmesh bench`, against a client that answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from node_runtime.errors import BadConfig
from pdmesh_cli.client_types import (
    CachedTokens,
    Delta,
    Event,
    Finish,
    FinishReason,
    GenerateOptions,
    ModelCard,
    PdmeshError,
    Prompt,
    Timings,
    Token,
    Usage,
)
from pdmesh_cli.load import Load, Outcomes, describe_failures, describe_rates, figures, run_load

NO_TIMINGS = Timings(
    prefill_queue_ms=0.0,
    prefill_compute_ms=0.0,
    transfer_ms=0.0,
    transfer_exposed_ms=0.0,
    transferred_bytes=0,
    transferred_runs=0,
    transferred_blocks=0,
    time_to_first_token_ms=0.0,
    decode_ms=0.0,
)


def load(**changes: int | float) -> Load:
    values: dict[str, int | float] = {
        "num_requests": 6,
        "concurrency": 2,
        "prompt_tokens": 10,
        "shared_tokens": 4,
        "max_tokens": 3,
        "seed": 5,
        "timeout_s": 10.0,
    }
    return Load(**{**values, **changes})  # type: ignore[arg-type]


class AnsweringClient:
    """Answers with three tokens; every prompt whose first own token is in `refused` fails."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.prompts: list[list[int]] = []
        self.num_running = 0
        self.most_running = 0
        self._fails_at = fails_at

    async def list_models(self) -> tuple[ModelCard, ...]:
        return (ModelCard(name="tiny", context_tokens=100, vocab_size=50),)

    async def generate(
        self, prompt: Prompt, options: GenerateOptions, *, timeout_s: float
    ) -> AsyncGenerator[Event, None]:
        self.prompts.append(list(prompt))  # type: ignore[arg-type]
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0)
            if len(self.prompts) == self._fails_at:
                raise PdmeshError("UNAVAILABLE", "no")
            for _ in range(3):
                yield Delta(text="x", tokens=(Token(token_id=1, logprob=None, top_logprobs=()),))
            yield Finish(
                reason=FinishReason.LENGTH,
                matched_token_id=None,
                matched_stop=None,
                usage=Usage(prompt_tokens=10, completion_tokens=3, cached=CachedTokens(prefill_device=4)),
                timings=NO_TIMINGS,
                num_replacements=1,
            )
        finally:
            self.num_running -= 1


async def test_every_prompt_is_sent_once_and_no_more_at_a_time_than_asked() -> None:
    client = AnsweringClient()
    outcomes = await run_load(client, load())  # type: ignore[arg-type]
    found = figures(outcomes)
    assert sorted(client.prompts) == sorted(load().prompts(50))
    assert client.most_running == 2
    assert (found["requests"], found["failures"], found["moves"]) == (6, 0, 6)
    assert found["cached_fraction"] == pytest.approx(0.4)
    assert found["completion_tokens_per_s"] == pytest.approx(18 / outcomes.elapsed_s)
    assert found["first_token_p50_ms"] <= found["first_token_p99_ms"] <= found["duration_p99_ms"]
    assert "6 requests in" in describe_rates(outcomes)


async def test_a_failure_is_counted_and_the_rest_goes_on() -> None:
    told: list[tuple[int, int]] = []

    def show(outcomes: Outcomes) -> None:
        told.append((outcomes.num_ended, outcomes.failures.total()))

    outcomes = await run_load(AnsweringClient(fails_at=2), load(), progress=show)  # type: ignore[arg-type]
    assert [num_ended for num_ended, _ in told] == [1, 2, 3, 4, 5, 6]
    assert told[-1] == (6, 1)
    assert figures(outcomes)["requests"] == 5
    assert describe_failures(outcomes.failures) == ["1 ended in UNAVAILABLE"]


def test_prompts_share_their_beginning_and_nothing_else_and_repeat_with_the_seed() -> None:
    prompts = load().prompts(1000)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt[4:]) for prompt in prompts}) == 6
    assert prompts == load().prompts(1000)
    assert prompts != load(seed=6).prompts(1000)


def test_a_beginning_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(BadConfig, match="shared_tokens: 11 given, at most prompt_tokens=10 allowed"):
        load(shared_tokens=11)
