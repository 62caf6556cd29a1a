"""The engine loop over the real scheduler and a fake executor, one step at a time on the test's thread."""

from __future__ import annotations

import itertools
import threading

import pytest
from support.fake_compute import FakeExecutor, Gate, expected_tokens, fake_core

from model_runtime.sampler import SampledToken, SamplingParams
from node_runtime.clock import ManualClock
from node_runtime.engine.delivery import deliver_now
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import (
    AcceptFirstToken,
    EndReason,
    GenerationEnded,
    GrantOffered,
    HandoverOffered,
    Invoke,
    PostEvents,
    RequestAdmitted,
    RequestFailed,
    RequestRetracted,
    StopRule,
    SubmitRequest,
    TokenGenerated,
    Update,
)
from node_runtime.errors import InternalError, InvalidRequest, NoUsableLogits
from scheduler_core import (
    AbortEvent,
    GrantedEvent,
    HandedOverEvent,
    QuiescedEvent,
    ReadyEvent,
    RequestSpec,
    Role,
)


class Bench:
    """An engine loop whose updates are kept per request."""

    def __init__(self, role: Role, **core: object) -> None:
        self.role = role
        self.core = fake_core(role, **core)
        self.executor: FakeExecutor = self.core.executor
        self.updates: dict[str, list[Update]] = {}
        self.fatal: list[BaseException] = []
        self.clock = ManualClock()
        self.loop = EngineLoop(
            self.core.scheduler,
            self.executor,
            group_ids=self.core.group_ids,
            clock=self.clock,
            deliver=deliver_now,
            on_fatal=self.fatal.append,
        )

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        is_declared: bool = True,
        seed: int = 0,
        **stop: object,
    ) -> None:
        """With `is_declared` False the scheduler does not know how long the completion may get."""
        updates = self.updates.setdefault(request_id, [])
        max_new_tokens = max_tokens if is_declared else None
        self.loop.post(
            SubmitRequest(
                spec=RequestSpec(request_id=request_id, tokens=prompt, max_new_tokens=max_new_tokens),
                sampling=SamplingParams(seed=seed),
                stop=None if self.role is Role.PREFILL else StopRule(max_new_tokens=max_tokens, **stop),
                sink=updates.append,
            )
        )

    def run(self) -> None:
        self.loop.run_until_idle()

    def run_with_peers(self, prompts: dict[str, list[int]]) -> None:
        """Decode role: peers that fill what they are granted and tell the first token."""
        self.loop.post(PostEvents(events=tuple(map(ReadyEvent, prompts))))
        waiting = dict(prompts)
        while waiting:
            self.run()
            granted = [name for name in waiting if GrantOffered in self.kinds(name)]
            assert granted, "nobody was granted anything"
            for request_id in granted:
                self._fill(request_id, waiting.pop(request_id))
        self.run()

    def _fill(self, request_id: str, prompt: list[int]) -> None:
        offer = next(update for update in self.updates[request_id] if isinstance(update, GrantOffered))
        table = self.core.scheduler.block_tables(request_id)[0].tolist()
        for position in range(offer.from_token, len(prompt)):
            for field_id in itertools.chain(*self.executor.stages):
                self.executor.arena.write_row(field_id, table, position, prompt[position])
        first = SampledToken(token_id=expected_tokens(prompt, 1)[0])
        self.loop.post(AcceptFirstToken(request_id=request_id, token=first))

    def tokens(self, request_id: str) -> list[int]:
        return [update.token.token_id for update in self.updates[request_id] if isinstance(update, TokenGenerated)]

    def kinds(self, request_id: str) -> list[type]:
        return [type(update) for update in self.updates[request_id]]

    def assert_empty(self) -> None:
        self.run()
        snapshot = self.loop.snapshot
        assert snapshot.active_lcm_blocks == snapshot.quarantined_lcm_blocks == snapshot.num_live_requests == 0
        assert self.core.scheduler.clear_cache()
        assert self.core.scheduler.capacity().empty_lcm_blocks == snapshot.total_lcm_blocks


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_a_fused_request_generates_to_its_limit_and_frees_everything() -> None:
    bench = Bench(Role.FUSED)
    bench.submit("a", PROMPT, max_tokens=5)
    bench.run()
    assert bench.tokens("a") == expected_tokens(PROMPT, 5)
    assert bench.kinds("a")[0] is RequestAdmitted
    end = bench.updates["a"][-1]
    assert isinstance(end, GenerationEnded)
    assert (end.reason, end.matched_token_id) == (EndReason.LENGTH, None)
    bench.assert_empty()


def test_requests_of_one_batch_do_not_touch_one_another() -> None:
    bench = Bench(Role.FUSED, token_budget=8)
    prompts = {f"r{index}": [*PROMPT[: 2 + index], index, 7, index] for index in range(6)}
    for request_id, prompt in prompts.items():
        bench.submit(request_id, prompt, max_tokens=6)
    bench.run()
    for request_id, prompt in prompts.items():
        assert bench.tokens(request_id) == expected_tokens(prompt, 6)
    bench.assert_empty()


def test_a_stop_token_ends_the_request_with_that_token() -> None:
    bench = Bench(Role.FUSED)
    stop = expected_tokens(PROMPT, 3)[2]
    bench.submit("a", PROMPT, max_tokens=50, stop_token_ids=frozenset({stop}))
    bench.run()
    assert bench.tokens("a") == expected_tokens(PROMPT, 3)
    end = bench.updates["a"][-1]
    assert isinstance(end, GenerationEnded)
    assert (end.reason, end.matched_token_id) == (EndReason.STOP, stop)
    bench.assert_empty()


def test_a_repeated_prompt_computes_only_what_its_hit_lacks() -> None:
    bench = Bench(Role.FUSED)
    bench.submit("a", PROMPT, max_tokens=1)
    bench.run()
    before = bench.executor.num_input_tokens
    bench.submit("b", PROMPT, max_tokens=1)
    bench.run()
    assert bench.executor.num_input_tokens - before == len(PROMPT) - 8
    admitted = bench.updates["b"][0]
    assert isinstance(admitted, RequestAdmitted)
    assert admitted.device_hit_tokens == 8
    assert bench.tokens("b") == bench.tokens("a")


def test_an_aborted_request_gets_no_further_token_and_makes_no_further_step() -> None:
    bench = Bench(Role.FUSED)
    bench.executor.before_pass = lambda plan: (
        bench.loop.post(PostEvents(events=(AbortEvent("a"),))) if bench.loop.snapshot.num_steps == 2 else None
    )
    bench.submit("a", PROMPT, max_tokens=50)
    bench.run()
    assert bench.loop.snapshot.num_steps == 3
    assert len(bench.tokens("a")) == 3
    bench.assert_empty()


def test_a_request_that_the_scheduler_refuses_is_told_why() -> None:
    bench = Bench(Role.FUSED, num_lcm_blocks=2)
    bench.submit("a", PROMPT, max_tokens=50)
    bench.run()
    (failed,) = bench.updates["a"]
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, InvalidRequest)
    assert '"a"' in failed.error.message
    bench.assert_empty()


def test_an_executor_fault_fails_the_requests_of_that_step_and_the_node_goes_on() -> None:
    bench = Bench(Role.FUSED)

    def break_down(plan: object) -> None:
        raise RuntimeError("the kernel refused")

    bench.executor.before_pass = break_down
    bench.submit("a", PROMPT)
    bench.submit("b", PROMPT)
    bench.run()
    for request_id in "ab":
        failed = bench.updates[request_id][-1]
        assert isinstance(failed, RequestFailed)
        assert isinstance(failed.error, InternalError)
        assert "kernel" not in failed.error.message
    assert bench.fatal == []
    bench.executor.before_pass = lambda plan: None
    bench.submit("c", PROMPT)
    bench.run()
    assert bench.tokens("c") == expected_tokens(PROMPT, 4)
    bench.assert_empty()


def test_a_fault_after_some_layers_publishes_nothing() -> None:
    bench = Bench(Role.FUSED)

    def break_down(stage: int) -> None:
        if stage == 1:
            raise RuntimeError("the kernel refused")

    bench.executor.before_stage = break_down
    bench.submit("a", PROMPT)
    bench.run()
    bench.executor.before_stage = lambda stage: None
    bench.submit("b", PROMPT)
    bench.run()
    admitted = bench.updates["b"][0]
    assert isinstance(admitted, RequestAdmitted)
    assert admitted.device_hit_tokens == 0
    assert bench.tokens("b") == expected_tokens(PROMPT, 4)


@pytest.mark.parametrize("role", [Role.FUSED, Role.DECODE])
def test_logits_that_say_nothing_end_their_own_request_and_no_other_of_the_pass(role: Role) -> None:
    bench = Bench(role)
    prompts = {f"r{index}": [*PROMPT, index] for index in range(4)}
    for request_id, prompt in prompts.items():
        bench.submit(request_id, prompt, max_tokens=6, seed=7 if request_id == "r1" else 0)
    bench.executor.broken_logits.add((7, len(PROMPT) + 1 + 3))
    num_rows: list[int] = []
    bench.executor.before_pass = lambda plan: num_rows.append(plan.num_rows)
    if role is Role.DECODE:
        bench.run_with_peers(prompts)
    else:
        bench.run()
    assert len(bench.tokens("r1")) == 3
    failed = bench.updates["r1"][-1]
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, NoUsableLogits)
    assert failed.error.message == "the model knows no next token: broken at position 14"
    for request_id in ("r0", "r2", "r3"):
        assert bench.tokens(request_id) == expected_tokens(prompts[request_id], 6)
    assert max(num_rows) == 4
    assert bench.fatal == []
    bench.assert_empty()


def test_a_prompt_whose_logits_say_nothing_leaves_no_prefix_of_its_last_chunk() -> None:
    bench = Bench(Role.FUSED)
    bench.executor.broken_logits.add((7, len(PROMPT)))
    bench.submit("a", PROMPT, seed=7)
    bench.run()
    assert bench.kinds("a") == [RequestAdmitted, RequestFailed]
    bench.submit("b", PROMPT)
    bench.run()
    admitted = bench.updates["b"][0]
    assert isinstance(admitted, RequestAdmitted)
    assert admitted.device_hit_tokens == 0
    assert bench.tokens("b") == expected_tokens(PROMPT, 4)
    bench.assert_empty()


def test_a_prefill_node_keeps_the_blocks_of_a_prompt_without_a_token_until_its_peer_is_quiet() -> None:
    bench = Bench(Role.PREFILL)
    bench.executor.broken_logits.add((7, len(PROMPT)))
    bench.submit("a", PROMPT, seed=7)
    bench.submit("b", PROMPT[:3])
    bench.run()
    assert bench.kinds("a") == [RequestAdmitted, RequestFailed]
    assert bench.kinds("b") == [RequestAdmitted, TokenGenerated, HandoverOffered]
    bench.loop.post(PostEvents(events=(GrantedEvent("b"), HandedOverEvent("b"))))
    bench.run()
    assert bench.loop.snapshot.active_lcm_blocks > 0
    bench.loop.post(PostEvents(events=(AbortEvent("a"), QuiescedEvent("a"))))
    bench.assert_empty()


def test_a_fault_while_zeroing_fails_the_plan_before_any_grant_is_told() -> None:
    bench = Bench(Role.DECODE)

    def break_down(plan: object) -> None:
        raise RuntimeError("no such block")

    bench.executor.before_zeroing = break_down
    bench.submit("a", PROMPT)
    bench.loop.post(PostEvents(events=(ReadyEvent("a"),)))
    bench.run()
    assert bench.kinds("a") == [RequestFailed]
    bench.loop.post(PostEvents(events=(AbortEvent("a"), QuiescedEvent("a"))))
    bench.assert_empty()


def test_a_decode_request_is_granted_zeroed_blocks_and_goes_on_from_the_first_token() -> None:
    bench = Bench(Role.DECODE)
    arena = bench.executor.arena
    arena.memory[:] = 0xAA
    bench.submit("a", PROMPT, max_tokens=3)
    bench.run()
    assert bench.updates["a"] == []
    bench.loop.post(PostEvents(events=(ReadyEvent("a"),)))
    bench.run()
    admitted, offer = bench.updates["a"]
    assert isinstance(admitted, RequestAdmitted)
    assert isinstance(offer, GrantOffered)
    (group,) = offer.groups
    assert (offer.from_token, group.first_slot, len(group.block_ids)) == (0, 0, 3)
    assert not arena.block_bytes("layers.0.k", group.block_ids[0]).any()
    for position, token in enumerate(PROMPT):
        for stage in bench.executor.stages:
            for field_id in stage:
                arena.write_row(field_id, group.block_ids, position, token)
    expected = expected_tokens(PROMPT, 3)
    bench.loop.post(AcceptFirstToken(request_id="a", token=SampledToken(token_id=expected[0])))
    bench.run()
    assert bench.tokens("a") == expected
    assert bench.kinds("a")[-1] is GenerationEnded
    bench.assert_empty()


def test_a_first_token_that_is_also_the_last_ends_the_request_without_a_step() -> None:
    bench = Bench(Role.DECODE)
    bench.submit("a", PROMPT, max_tokens=1)
    bench.loop.post(PostEvents(events=(ReadyEvent("a"),)))
    bench.run()
    bench.loop.post(AcceptFirstToken(request_id="a", token=SampledToken(token_id=5)))
    bench.run()
    assert bench.kinds("a")[-2:] == [TokenGenerated, GenerationEnded]
    assert bench.loop.snapshot.num_steps == 0
    bench.assert_empty()


def test_aborting_a_granted_request_quarantines_its_blocks_until_the_peer_is_quiet() -> None:
    bench = Bench(Role.DECODE)
    bench.submit("a", PROMPT)
    bench.loop.post(PostEvents(events=(ReadyEvent("a"),)))
    bench.run()
    bench.loop.post(PostEvents(events=(AbortEvent("a"),)))
    bench.run()
    assert bench.loop.snapshot.quarantined_lcm_blocks > 0
    bench.loop.post(PostEvents(events=(QuiescedEvent("a"),)))
    bench.assert_empty()


def test_a_first_token_for_a_request_that_was_aborted_changes_nothing() -> None:
    bench = Bench(Role.DECODE)
    bench.submit("a", PROMPT)
    bench.loop.post(PostEvents(events=(ReadyEvent("a"),)))
    bench.run()
    bench.loop.post(PostEvents(events=(AbortEvent("a"), QuiescedEvent("a"))))
    bench.loop.post(AcceptFirstToken(request_id="a", token=SampledToken(token_id=5)))
    bench.run()
    assert TokenGenerated not in bench.kinds("a")
    assert bench.fatal == []
    bench.assert_empty()


def test_a_prefill_request_yields_one_token_a_handover_and_keeps_its_blocks_until_it_is_handed_over() -> None:
    bench = Bench(Role.PREFILL)
    bench.submit("a", PROMPT, max_tokens=1)
    bench.run()
    assert bench.kinds("a") == [RequestAdmitted, TokenGenerated, HandoverOffered]
    assert bench.tokens("a") == expected_tokens(PROMPT, 1)
    assert bench.loop.snapshot.active_lcm_blocks > 0
    bench.loop.post(PostEvents(events=(GrantedEvent("a"), HandedOverEvent("a"))))
    bench.assert_empty()


def test_a_broken_contract_takes_the_engine_down_and_everybody_is_told() -> None:
    bench = Bench(Role.PREFILL)
    told = threading.Event()
    bench.loop._on_fatal = lambda error: (bench.fatal.append(error), told.set())
    bench.loop.start()
    bench.submit("a", PROMPT)
    bench.loop.post(PostEvents(events=(HandedOverEvent("a"),)))
    assert told.wait(30)
    assert "no handover was planned" in str(bench.fatal[0])
    bench.submit("late", PROMPT)
    bench.loop.stop()
    for request_id in ("a", "late"):
        failed = bench.updates[request_id][-1]
        assert isinstance(failed, RequestFailed)
        assert isinstance(failed.error, InternalError)


def test_an_idle_engine_sleeps_and_wakes_for_a_command() -> None:
    bench = Bench(Role.FUSED)
    bench.loop.start()
    gate = Gate()
    gate.open()
    bench.loop.post(Invoke(action=gate.wait))
    assert gate.reached.wait(30)
    assert bench.loop.snapshot.num_steps == 0
    bench.loop.stop()
    assert bench.fatal == []


@pytest.mark.parametrize("max_new_tokens", [0, -1])
def test_a_stop_rule_without_a_token_cannot_be_made(max_new_tokens: int) -> None:
    with pytest.raises(ValueError, match=str(max_new_tokens)):
        StopRule(max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("role", [Role.FUSED, Role.DECODE])
def test_requests_that_gave_way_go_on_without_a_seam(role: Role) -> None:
    bench = Bench(role, num_lcm_blocks=12)
    prompts = {f"r{index}": [*PROMPT[:6], index] for index in range(4)}
    for request_id, prompt in prompts.items():
        bench.submit(request_id, prompt, max_tokens=18, is_declared=False)
    if role is Role.DECODE:
        bench.run_with_peers(prompts)
    else:
        bench.run()
    for request_id, prompt in prompts.items():
        assert bench.tokens(request_id) == expected_tokens(prompt, 18)
        assert bench.kinds(request_id).count(GenerationEnded) == 1
    num_retractions = bench.loop.snapshot.num_retractions
    assert num_retractions > 0
    assert num_retractions == sum(bench.kinds(request_id).count(RequestRetracted) for request_id in prompts)
    bench.assert_empty()
