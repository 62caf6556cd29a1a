"""An engine whose ranks mirror one another: every rank is fed the same, and none goes on without the others."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import cast

import pytest
from support.fake_compute import FakeExecutor, expected_tokens, fake_core

from cache_runtime.shared_memory import SharedMemory
from model_runtime.sampler import SamplingParams
from node_runtime.clock import ManualClock
from node_runtime.engine.delivery import deliver_now
from node_runtime.engine.loop import EngineLoop, Executor
from node_runtime.engine.messages import (
    GrantOffered,
    PostEvents,
    RequestFailed,
    StopRule,
    SubmitRequest,
    TokenGenerated,
    Update,
)
from node_runtime.engine.ranks.follower import Follower
from node_runtime.engine.ranks.leader import Followers, MirroredExecutor, MirroredScheduler
from node_runtime.engine.ranks.link import RankLink, RankLost
from node_runtime.engine.ranks.processes import FollowerArena
from node_runtime.engine.scheduler import EngineBroken
from scheduler_core import AbortEvent, Plan, ReadyEvent, RequestSpec, Role, Scheduler

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
JOIN_TIMEOUT_S = 30.0


class FollowingFake:
    """A fake executor as a follower has one, which keeps what it was told in order."""

    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor
        self.calls: list[str] = []
        self.adapters: list[dict[str, str]] = []
        self.before_zeroing: Callable[[], object] = lambda: None

    def zero_blocks(self, plan: Plan) -> None:
        self.before_zeroing()
        self.calls.append("zero")
        self._executor.zero_blocks(plan)

    def logits(self, plan: Plan, on_stage: Callable[[int], None] | None, adapters: Mapping[str, str]) -> object:
        self.calls.append("compute")
        self.adapters.append(dict(adapters))
        return None


class TwoRanks:
    """A leader on the test's thread, and a follower on another."""

    def __init__(self, role: Role) -> None:
        leading, following = fake_core(role), fake_core(role)
        self.following_scheduler = cast(Scheduler, following.scheduler)
        self.leading_scheduler = cast(Scheduler, leading.scheduler)
        self.executor = FollowingFake(cast(FakeExecutor, following.executor))
        self.leading_executor = cast(FakeExecutor, leading.executor)
        ours, theirs = socket.socketpair()
        self.link = RankLink(ours, "tensor rank 1")
        self._follower_link = RankLink(theirs, "tensor rank 0")
        self._follower = Follower(self._follower_link, self.following_scheduler, self.executor)
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        followers = Followers([self.link])
        self.scheduler = MirroredScheduler(self.leading_scheduler, followers)
        self.loop = EngineLoop(
            self.scheduler,
            MirroredExecutor(leading.executor, followers),
            group_ids=leading.group_ids,
            clock=ManualClock(),
            deliver=deliver_now,
            on_fatal=self.errors.append,
        )
        self.updates: dict[str, list[Update]] = {}
        self._thread.start()

    def submit(
        self,
        request_id: str,
        num_tokens: int = 4,
        *,
        prompt: list[int] = PROMPT,
        adapter: str | None = None,
        seed: int = 0,
    ) -> None:
        updates = self.updates.setdefault(request_id, [])
        self.loop.post(
            SubmitRequest(
                spec=RequestSpec(request_id=request_id, tokens=prompt, max_new_tokens=num_tokens),
                sampling=SamplingParams(seed=seed),
                stop=StopRule(max_new_tokens=num_tokens),
                sink=updates.append,
                adapter=adapter,
            )
        )

    def end(self) -> None:
        """The leader goes; the follower has carried out everything when this returns."""
        self.link.close()
        self.wait_for_follower()

    def wait_for_follower(self) -> None:
        """Until its thread has ended."""
        self._thread.join(JOIN_TIMEOUT_S)
        assert not self._thread.is_alive()

    def _follow(self) -> None:
        try:
            self._follower.run()
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._follower_link.close()


@contextmanager
def two_ranks(role: Role = Role.FUSED) -> Iterator[TwoRanks]:
    ranks = TwoRanks(role)
    try:
        yield ranks
    finally:
        ranks.end()


def test_the_follower_hears_the_adapter_of_each_request_in_every_pass() -> None:
    with two_ranks() as ranks:
        ranks.submit("a", 2)
        ranks.submit("b", 3, prompt=PROMPT[:3], adapter="red")
        ranks.loop.run_until_idle()
    assert not ranks.errors
    assert ranks.executor.adapters == [{"b": "red"}] * len(ranks.executor.adapters)
    assert len(ranks.executor.adapters) == ranks.executor.calls.count("compute") > 2


def test_both_schedulers_end_in_one_state_and_the_follower_computed_every_plan() -> None:
    with two_ranks() as ranks:
        ranks.submit("a")
        ranks.submit("b", 6, prompt=PROMPT[:3])
        ranks.loop.run_until_idle()
        tokens = [update.token.token_id for update in ranks.updates["a"] if isinstance(update, TokenGenerated)]
        assert tokens == expected_tokens(PROMPT, 4)
        ranks.submit("gone")
        ranks.loop.post(PostEvents(events=(AbortEvent("gone"),)))
        ranks.loop.run_until_idle()
        assert ranks.scheduler.clear_cache()
    assert not ranks.errors
    assert ranks.executor.calls.count("compute") == ranks.loop.snapshot.num_steps > 0
    assert ranks.following_scheduler.describe() == ranks.leading_scheduler.describe()
    capacity = ranks.following_scheduler.capacity()
    assert capacity.empty_lcm_blocks == capacity.total_lcm_blocks


def test_what_the_leader_refuses_its_followers_never_hear_of() -> None:
    with two_ranks() as ranks:
        ranks.submit("large", 4, prompt=[1] * 100_000)
        ranks.loop.run_until_idle()
        assert isinstance(ranks.updates["large"][-1], RequestFailed)
        ranks.submit("a")
        ranks.loop.run_until_idle()
    assert not ranks.errors
    assert ranks.following_scheduler.describe() == ranks.leading_scheduler.describe()


def test_a_grant_is_told_only_when_the_blocks_of_every_rank_are_zero() -> None:
    with two_ranks(Role.DECODE) as ranks:
        offered_before: list[bool] = []
        ranks.executor.before_zeroing = lambda: offered_before.append(is_offered(ranks))
        ranks.submit("a")
        ranks.loop.post(PostEvents(events=(ReadyEvent("a"),)))
        ranks.loop.run_until_idle()
        assert is_offered(ranks)
        assert ranks.executor.calls[-1] == "zero"
    assert offered_before
    assert not any(offered_before)


def is_offered(ranks: TwoRanks) -> bool:
    return any(isinstance(update, GrantOffered) for update in ranks.updates["a"])


def test_a_follower_with_another_plan_stops_before_it_touches_anything() -> None:
    with two_ranks() as ranks:
        ranks.following_scheduler.submit([RequestSpec(request_id="stray", tokens=[1, 2], max_new_tokens=1)])
        ranks.submit("a")
        with suppress(EngineBroken):  # it may notice in the middle of this request, or after it
            ranks.loop.run_until_idle()
        ranks.wait_for_follower()
        ranks.submit("b")
        with pytest.raises(EngineBroken, match="tensor rank 1 is gone"):
            ranks.loop.run_until_idle()
    assert ranks.executor.calls == []
    (error,) = ranks.errors
    assert "plans of the ranks differ" in str(error)


def test_a_leader_whose_follower_is_gone_cannot_go_on() -> None:
    ranks = TwoRanks(Role.FUSED)
    ranks.end()
    ranks.submit("a")
    with pytest.raises(EngineBroken, match="tensor rank 1 is gone"):
        ranks.loop.run_until_idle()


def test_a_failed_pass_ends_the_engine_instead_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks may have carried it out."""

    def fail(*_: object) -> None:
        raise ValueError("no memory")

    monkeypatch.setattr(FakeExecutor, "execute", fail)
    with two_ranks() as ranks:
        ranks.submit("a")
        with pytest.raises(EngineBroken, match="a forward pass failed on one rank: no memory"):
            ranks.loop.run_until_idle()


def test_logits_that_say_nothing_end_their_request_on_every_rank_and_the_engine_goes_on() -> None:
    with two_ranks() as ranks:
        ranks.leading_executor.broken_logits = {(7, len(PROMPT)), (8, len(PROMPT) + 2)}
        ranks.submit("at once", seed=7)
        ranks.submit("later", seed=8)
        ranks.submit("sound", 6, prompt=PROMPT[:3])
        ranks.loop.run_until_idle()
        assert [isinstance(ranks.updates[name][-1], RequestFailed) for name in ("at once", "later")] == [True, True]
        tokens = [update.token.token_id for update in ranks.updates["sound"] if isinstance(update, TokenGenerated)]
        assert tokens == expected_tokens(PROMPT[:3], 6)
        assert ranks.scheduler.clear_cache()
    assert not ranks.errors
    assert ranks.following_scheduler.describe() == ranks.leading_scheduler.describe()
    capacity = ranks.following_scheduler.capacity()
    assert capacity.empty_lcm_blocks == capacity.total_lcm_blocks


def test_frames_of_any_size_arrive_whole_and_a_silent_rank_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = RankLink(ours, "tensor rank 0"), RankLink(theirs, "tensor rank 1")
    frames = [b"", b"x", bytes(range(256)) * 4000]
    writer = threading.Thread(target=lambda: [sender.send(frame) for frame in frames])
    writer.start()
    assert [receiver.receive(JOIN_TIMEOUT_S) for _ in frames] == frames
    writer.join()
    with pytest.raises(RankLost, match=r"tensor rank 1 did not answer within 0\.05 s"):
        receiver.receive(0.05)
    sender.close()
    assert receiver.receive() is None
    receiver.close()


def test_a_rank_that_reads_nothing_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    sender = RankLink(ours, "tensor rank 1")
    with pytest.raises(RankLost, match=r"tensor rank 1 took nothing for 0\.05 s"):
        sender.send(bytes(8 << 20), 0.05)
    sender.close()
    theirs.close()


def test_a_rank_that_goes_in_the_middle_of_a_frame_is_lost() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall((10).to_bytes(4, "little") + b"half")
    ours.close()
    receiver = RankLink(theirs, "tensor rank 1")
    with pytest.raises(RankLost, match="gone in the middle of a frame"):
        receiver.receive()
    receiver.close()


def test_a_file_is_handed_over_between_two_frames() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = RankLink(ours, "tensor rank 1"), RankLink(theirs, "tensor rank 0")
    memory = SharedMemory(4096, "test")
    memory.mapping[:4] = b"rows"
    sender.send(b"before")
    sender.send_descriptor(memory.descriptor)
    sender.send(b"after")
    assert receiver.receive(JOIN_TIMEOUT_S) == b"before"
    arena = FollowerArena(receiver.receive_descriptor(JOIN_TIMEOUT_S), 4096)
    assert receiver.receive(JOIN_TIMEOUT_S) == b"after"
    assert ctypes.string_at(arena.base_address, 4) == b"rows"
    ctypes.memmove(arena.base_address, b"seen", 4)
    assert bytes(memory.mapping[:4]) == b"seen"
    arena.close()
    sender.close()
    with pytest.raises(RankLost, match="handed no file over"):
        receiver.receive_descriptor(JOIN_TIMEOUT_S)
    receiver.close()


def test_a_stage_is_passed_on_once_the_next_one_is_stored_or_the_pass_is_over() -> None:
    """Only then has every rank given what it makes of its rows, and so stored them."""
    told: list[str] = []

    class Stages:
        def zero_blocks(self, plan: Plan) -> None: ...

        def execute(self, plan: Plan, sampling: object, on_stage: Callable[[int], None]) -> tuple[None, ...]:
            for stage in range(3):
                told.append(f"stored {stage}")
                on_stage(stage)
            told.append("over")
            return ()

    executor = MirroredExecutor(cast(Executor, Stages()), Followers([]))
    executor.execute(cast(Plan, None), {}, lambda stage: told.append(f"passed on {stage}"))
    assert told == [
        "stored 0",
        "stored 1",
        "passed on 0",
        "stored 2",
        "passed on 1",
        "over",
        "passed on 2",
    ]
