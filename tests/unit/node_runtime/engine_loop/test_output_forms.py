"""What the engine loop asks and tells the matcher of a form: each token once and in order, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from support.fake_compute import VOCAB_SIZE, FakeExecutor, expected_tokens, fake_core

from model_runtime.sampler import SampledToken, SamplingParams
from node_runtime.clock import ManualClock
from node_runtime.engine.delivery import deliver_now
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import (
    GenerationEnded,
    RequestFailed,
    RequestRetracted,
    StopRule,
    SubmitRequest,
    TokenGenerated,
    Update,
)
from node_runtime.errors import InvalidRequest
from scheduler_core import RequestSpec, Role


class ScriptedMatcher:
    """Remembers what it is asked and told; its masks say how many tokens it had been told."""

    def __init__(self, *, fails_after: int | None = None) -> None:
        self.accepted: list[int] = []
        self.num_masks = 0
        self._fails_after = fails_after

    def allowed(self) -> np.ndarray:
        if self._fails_after == len(self.accepted):
            raise ValueError("regex: too much work")
        self.num_masks += 1
        mask = np.zeros(VOCAB_SIZE, np.bool_)
        mask[len(self.accepted)] = True
        return mask

    def accept(self, token_ids: Sequence[int]) -> None:
        self.accepted += token_ids


class Bench:
    """A fused engine over the real scheduler and a fake executor whose masks are kept by request."""

    def __init__(self, **core: object) -> None:
        made = fake_core(Role.FUSED, **core)
        self.core = made
        self.masks: dict[str, list[int | None]] = {}
        self.updates: dict[str, list[Update]] = {}
        executor: FakeExecutor = made.executor
        compute = executor.execute

        def execute(plan, sampling: Mapping[str, SamplingParams], *rest: object) -> tuple[SampledToken | None, ...]:
            for request_id, is_sampled in zip(plan.request_ids, plan.logits_wanted.tolist(), strict=True):
                allowed = sampling[request_id].allowed
                if not is_sampled:
                    assert allowed is None
                    continue
                number = None if allowed is None else int(np.flatnonzero(allowed)[0])
                self.masks.setdefault(request_id, []).append(number)
            return compute(plan, sampling, *rest)

        executor.execute = execute
        self.loop = EngineLoop(
            made.scheduler,
            executor,
            group_ids=made.group_ids,
            clock=ManualClock(),
            deliver=deliver_now,
            on_fatal=pytest.fail,
        )

    def submit(
        self, request_id: str, prompt: list[int], max_tokens: int, matcher: ScriptedMatcher | None, *, declared: bool
    ) -> None:
        self.loop.post(
            SubmitRequest(
                spec=RequestSpec(request_id=request_id, tokens=prompt, max_new_tokens=max_tokens if declared else None),
                sampling=SamplingParams(),
                stop=StopRule(max_new_tokens=max_tokens),
                sink=self.updates.setdefault(request_id, []).append,
                matcher=matcher,
            )
        )

    def run(self) -> None:
        self.loop.run_until_idle()
        snapshot = self.loop.snapshot
        assert snapshot.active_lcm_blocks == snapshot.num_live_requests == 0

    def tokens(self, request_id: str) -> list[int]:
        return [update.token.token_id for update in self.updates[request_id] if isinstance(update, TokenGenerated)]


def test_a_mask_is_asked_for_where_a_token_is_sampled_and_each_token_is_told_once() -> None:
    bench, matcher = Bench(token_budget=8), ScriptedMatcher()
    prompt = list(range(20))
    bench.submit("formed", prompt, 5, matcher, declared=True)
    bench.submit("free", prompt[:3], 5, None, declared=True)
    bench.run()
    # Three chunks of the prompt, of which the last one is sampled.
    assert bench.masks["formed"] == [0, 1, 2, 3, 4]
    assert bench.masks["free"] == [None] * 5
    assert matcher.accepted == bench.tokens("formed") == expected_tokens(prompt, 5)


def test_requests_that_gave_way_tell_their_matchers_nothing_twice() -> None:
    bench = Bench(num_lcm_blocks=16)
    matchers = {f"r{index}": ScriptedMatcher() for index in range(4)}
    for index, (request_id, matcher) in enumerate(matchers.items()):
        bench.submit(request_id, list(range(index, index + 7)), 24, matcher, declared=False)
    bench.run()
    assert any(isinstance(update, RequestRetracted) for updates in bench.updates.values() for update in updates)
    for index, (request_id, matcher) in enumerate(matchers.items()):
        assert matcher.accepted == bench.tokens(request_id) == expected_tokens(range(index, index + 7), 24)
        assert bench.masks[request_id] == list(range(24))


def test_a_form_that_proves_too_much_fails_its_own_request_alone() -> None:
    bench = Bench()
    bench.submit("formed", [1, 2, 3], 6, ScriptedMatcher(fails_after=2), declared=True)
    bench.submit("free", [4, 5, 6], 6, None, declared=True)
    bench.run()
    assert len(bench.tokens("formed")) == 2
    (failed,) = (update for update in bench.updates["formed"] if isinstance(update, RequestFailed))
    assert isinstance(failed.error, InvalidRequest)
    assert "sampling.structured_output.regex: too much work" in failed.error.message
    assert bench.tokens("free") == expected_tokens([4, 5, 6], 6)
    assert isinstance(bench.updates["free"][-1], GenerationEnded)
