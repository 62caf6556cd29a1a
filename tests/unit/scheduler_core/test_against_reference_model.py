"""The native scheduler against a slow, obvious model of it (tests/reference_model).

Both live through the same random histories; every field of every plan, the gauges, all block tables and the whole dump
must be equal after every step. PDMESH_HYPOTHESIS_PROFILE=nightly looks for longer and at longer histories.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as HypothesisPhase
from reference_model import (
    Books,
    Event,
    EventKind,
    FullHistory,
    Gauges,
    GroupKind,
    GroupPolicy,
    GroupShape,
    Plan,
    ReferenceScheduler,
    Request,
    Role,
    SchedulerShape,
    SlidingWindow,
    State,
    Submission,
)
from reference_model.group_policies import Boundary, Completed, Tier
from reference_model.retraction import Resolution
from reference_model.rounds import Round
from reference_model.values import Admission, Handover, Occupancy, RemotePrefill

import scheduler_core as sc

from .histories import ComeAgain, Drawn, History, MakePlan, Prompt, Step, Submit, histories
from .side_by_side import SideBySide

settings.register_profile(
    "every commit",
    max_examples=120,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
)
settings.register_profile("nightly", settings.get_profile("every commit"), max_examples=20_000)
PROFILE = os.environ.get("PDMESH_HYPOTHESIS_PROFILE", "every commit")
MAX_NUM_MOVES = {"every commit": 60, "nightly": 200}[PROFILE]
TIMEOUT_S = {"every commit": 600, "nightly": 0}[PROFILE]  # 0: none. Most of it is for making a failing history short.

ModelMaker: TypeAlias = Callable[[SchedulerShape], ReferenceScheduler]


def live_through(drawn: Drawn, make_model: ModelMaker = ReferenceScheduler) -> None:
    shape, moves = drawn
    try:
        history = History(SideBySide(shape, make_model))
        history.play(moves)
        history.come_to_rest()
    except AssertionError as divergence:
        divergence.add_note("\n".join(map(repr, (shape, *moves))))
        raise


@pytest.mark.behaviour("T8")
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("role", Role)
def test_the_core_decides_as_the_model_does(role: Role) -> None:
    @settings(settings.get_profile(PROFILE))
    @given(histories(role, MAX_NUM_MOVES))
    def every_history(drawn: Drawn) -> None:
        live_through(drawn)

    every_history()


# What random histories reach too seldom.

PLAIN = GroupShape(group_id="plain", block_granularity=4, cache_blocks_per_lcm_block=1)
PACKED = GroupShape(group_id="packed", block_granularity=2, cache_blocks_per_lcm_block=8)


def sides_of(role: Role, num_lcm_blocks: int, groups: tuple[GroupShape, ...] = (PLAIN,)) -> SideBySide:
    return SideBySide(
        SchedulerShape(
            role=role,
            prefix_granularity=4,
            num_lcm_blocks=num_lcm_blocks,
            max_batch_size=8,
            token_budget=64,
            groups=groups,
        )
    )


def sliding(name: str, *, window_tokens: int, block_granularity: int, cache_blocks_per_lcm_block: int) -> GroupShape:
    return GroupShape(
        group_id=name,
        kind=GroupKind.SLIDING,
        window_tokens=window_tokens,
        block_granularity=block_granularity,
        cache_blocks_per_lcm_block=cache_blocks_per_lcm_block,
    )


def submission(
    request_id: str, tokens: Sequence[int], max_new_tokens: int = 1, *, local_prefill: bool = False
) -> Submission:
    return Submission(
        request_id=request_id, tokens=tuple(tokens), max_new_tokens=max_new_tokens, local_prefill=local_prefill
    )


def events(kind: EventKind, *request_ids: str, tokens: tuple[int, ...] = ()) -> list[Event]:
    return [Event(kind, request_id, tokens) for request_id in request_ids]


@pytest.mark.parametrize(
    ("role", "big_is_local", "small_is_local"),
    [
        (Role.FUSED, False, False),
        (Role.PREFILL, False, False),
        (Role.DECODE, False, False),
        (Role.DECODE, True, False),
        (Role.DECODE, False, True),
        (Role.DECODE, True, True),
    ],
)
def test_overtaking_ends_at_the_same_time(role: Role, big_is_local: bool, small_is_local: bool) -> None:
    sides = sides_of(role, num_lcm_blocks=6)
    sides.submit([submission("holder", range(8), 4)])
    if role is Role.DECODE:
        sides.advance(events(EventKind.READY, "holder"))
    sides.plan()
    sides.submit([submission("big", range(50, 70), 4, local_prefill=big_is_local)])
    if role is Role.DECODE and not big_is_local:
        sides.advance(events(EventKind.READY, "big"))
    sides.plan()
    started: list[str] = []
    for number in range(80):
        name = f"small{number}"
        sides.submit([submission(name, [200 + number], local_prefill=small_is_local)])
        if role is Role.DECODE and not small_is_local:
            sides.advance(events(EventKind.READY, name))
        started += [admission.request_id for admission in sides.plan().admissions]
        sides.advance(events(EventKind.ABORT, name))
        if role is not Role.FUSED:
            sides.advance(events(EventKind.QUIESCED, name))
    assert 64 <= len(started) < 70
    sides.advance(events(EventKind.ABORT, "holder"))
    if role is not Role.FUSED:
        sides.advance(events(EventKind.QUIESCED, "holder"))
    assert "big" in [admission.request_id for _ in range(2) for admission in sides.plan().admissions]


def test_a_prompt_whose_hits_are_scattered_over_many_parents_starts_without_them() -> None:
    sides = sides_of(Role.FUSED, num_lcm_blocks=10, groups=(PLAIN, PACKED))
    turns = list(range(31))
    for name, tokens, finished in (
        ("other", range(50, 58), []),
        ("turn1", turns[:12], ["turn1"]),
        ("third", range(70, 78), ["other", "third"]),
        ("turn2", turns[:16], ["turn2"]),
    ):
        sides.submit([submission(name, tokens)])
        sides.plan()
        sides.advance(events(EventKind.RESULT, name, tokens=(7,)))
        sides.advance(events(EventKind.FINISH, *finished))
        sides.plan()
    sides.submit([submission("turn3", turns)])
    assert sides.plan().admissions == [Admission("turn3", 0)]


def test_what_gave_way_without_a_prefix_cache_comes_back_to_its_own_state() -> None:
    shape = SchedulerShape(
        role=Role.DECODE,
        prefix_granularity=4,
        num_lcm_blocks=21,
        max_batch_size=5,
        token_budget=24,
        groups=(
            GroupShape(group_id="full", block_granularity=4, cache_blocks_per_lcm_block=1),
            GroupShape(group_id="state", kind=GroupKind.STATE, block_granularity=4, cache_blocks_per_lcm_block=1),
        ),
        enable_prefix_cache=False,
        verify_width=4,
        overlap_depth=1,
        num_host_lcm_blocks=2,
    )
    short, long = Prompt(num_tokens=1, max_new_tokens=0), Prompt(num_tokens=32)
    live_through((shape, [Submit((short,)), Submit((long, long)), *8 * [Step(ends=True, overlaps=False)]]))


def test_what_the_device_has_behind_its_own_hit_is_not_read_from_storage() -> None:
    """So the last prompt need not wait until no later chunk is computed beside it."""
    shape = SchedulerShape(
        role=Role.PREFILL,
        prefix_granularity=4,
        num_lcm_blocks=59,
        max_batch_size=5,
        token_budget=24,
        groups=(
            sliding("near", window_tokens=3, block_granularity=1, cache_blocks_per_lcm_block=4),
            GroupShape(group_id="full", block_granularity=4, cache_blocks_per_lcm_block=2),
            sliding("far", window_tokens=10, block_granularity=4, cache_blocks_per_lcm_block=1),
        ),
        verify_width=4,
        overlap_depth=1,
        num_host_lcm_blocks=2,
        enable_storage=True,
    )
    short, long = Prompt(num_tokens=12, fork_token=4), Prompt(num_tokens=13, stem=1, fork_token=4)
    twice = [Submit((short, short)), ComeAgain(302), Submit((long, long)), ComeAgain(230)]
    live_through((shape, [*twice, MakePlan()]))


# The comparison itself.


@pytest.mark.parametrize(
    ("native", "model"),
    [
        (sc.Plan, Plan),
        (sc.Capacity, Gauges),
        (sc.GroupOccupancy, Occupancy),
        (sc.RemotePrefill, RemotePrefill),
        (sc.Handover, Handover),
        (sc.Admission, Admission),
    ],
)
def test_everything_that_the_core_tells_is_compared(native: type, model: type) -> None:
    told = {name for name in dir(native) if not name.startswith("_")}
    assert told == {each.name for each in fields(model)}


class EvictsTheShallowestFirst(ReferenceScheduler):
    class Policy(FullHistory):
        def eviction_place(self, boundary: Boundary, was_hit: bool, end_token: int) -> tuple[Tier, int]:
            return Tier.CLOSED_PREFIX, end_token

    def make_policy(self, group: GroupShape) -> GroupPolicy:
        return self.Policy(self.shape, group) if group.kind is GroupKind.FULL else super().make_policy(group)


class SlidesATokenTooEarly(ReferenceScheduler):
    class Policy(SlidingWindow):
        def num_expired_slots(self, num_computed_tokens: int) -> int:
            return super().num_expired_slots(num_computed_tokens + 1)

    def make_policy(self, group: GroupShape) -> GroupPolicy:
        is_sliding = group.kind is GroupKind.SLIDING and not group.is_replayable
        return self.Policy(self.shape, group) if is_sliding else super().make_policy(group)


class PublishesStatesOfChanceBoundaries(ReferenceScheduler):
    class Policy(State):
        def slots_to_publish(self, completed: Completed) -> range:
            return super().slots_to_publish(replace(completed, boundary=Boundary.PROMOTED))

    def make_policy(self, group: GroupShape) -> GroupPolicy:
        return self.Policy(self.shape, group) if group.kind is GroupKind.STATE else super().make_policy(group)


class PublishesWhatWasAborted(ReferenceScheduler):
    def end_early(self, request: Request) -> None:
        if request.is_resident:
            self.books.publish_pending(request)
        super().end_early(request)


class ForgetsTheReserve(ReferenceScheduler):
    class ForgetfulBooks(Books):
        def headroom_tokens(self, request: Request) -> int:
            return 0

    def make_books(self, policies: Sequence[GroupPolicy]) -> Books:
        return self.ForgetfulBooks(self.shape, policies)


class FreesWhatAPeerMayTouch(ReferenceScheduler):
    def end_early(self, request: Request) -> None:
        self.end(request)


class NobodyGivesWay(ReferenceScheduler):
    def resolve_blocked(self, current: Round) -> Resolution:
        return Resolution()


class GivesWayWithoutPublishing(ReferenceScheduler):
    class ForgetfulBooks(Books):
        def publish_snapshot(self, request: Request) -> None:
            pass

    def make_books(self, policies: Sequence[GroupPolicy]) -> Books:
        return self.ForgetfulBooks(self.shape, policies)


@pytest.mark.parametrize(
    ("faulty", "roles"),
    [
        (EvictsTheShallowestFirst, Role),
        (SlidesATokenTooEarly, (Role.FUSED,)),
        (PublishesStatesOfChanceBoundaries, (Role.FUSED,)),
        (PublishesWhatWasAborted, Role),
        (ForgetsTheReserve, Role),
        (FreesWhatAPeerMayTouch, (Role.PREFILL, Role.DECODE)),
        (NobodyGivesWay, (Role.FUSED, Role.DECODE)),
        (GivesWayWithoutPublishing, (Role.FUSED, Role.DECODE)),
    ],
)
def test_a_fault_planted_in_the_model_is_found(faulty: type[ReferenceScheduler], roles: Sequence[Role]) -> None:
    for role in roles:

        @settings(
            settings.get_profile("every commit"),
            # Most are found long before. What is drawn depends on which modules the process has loaded.
            max_examples=800,
            derandomize=True,
            database=None,
            phases=[HypothesisPhase.generate],
        )
        @given(histories(role, MAX_NUM_MOVES))
        def every_history(drawn: Drawn) -> None:
            live_through(drawn, faulty)

        with pytest.raises(AssertionError):
            every_history()
