"""Which prefixes a scheduler says its device cache holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, scheduler_config, sliding_group, spec, state_group
from .prefix_router import Router, hashes_of


def scheduler_with_events(**changes: object) -> sc.Scheduler:
    return sc.Scheduler(scheduler_config(enable_prefix_events=True, **changes))  # type: ignore[arg-type]


def serve(scheduler: sc.Scheduler, request: sc.RequestSpec) -> None:
    """From submission to the end."""
    scheduler.submit([request])
    runtime = Runtime(scheduler)
    runtime.run_until_idle()
    runtime.finish(request.request_id)


def names_of(events: Sequence[sc.PrefixEvent]) -> list[str]:
    return [type(event).__name__.removeprefix("Prefix").lower() for event in events]


@pytest.mark.behaviour("P3")
def test_the_worked_hashes() -> None:
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8]) == [0xDD1CC29A217B1EFF, 0xAD3BA5E45C6213FE]
    scheduler = scheduler_with_events()
    serve(scheduler, spec("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_new_tokens=1))
    first, second = scheduler.drain_prefix_events()
    assert isinstance(first, sc.PrefixStored)
    assert isinstance(second, sc.PrefixStored)
    assert (first.hash, first.parent_hash) == (0xDD1CC29A217B1EFF, None)
    assert (second.hash, second.parent_hash) == (0xAD3BA5E45C6213FE, 0xDD1CC29A217B1EFF)
    assert first.tokens.tolist() == [1, 2, 3, 4]
    assert first.tokens.dtype == np.int32
    assert not first.tokens.flags.writeable
    assert second.tokens.tolist() == [5, 6, 7, 8]
    assert second.prefix_granularity == 4


@pytest.mark.behaviour("P1")
def test_a_chunk_is_announced_when_its_result_has_landed_and_it_is_published() -> None:
    scheduler = scheduler_with_events(token_budget=8)
    runtime = Runtime(scheduler)
    scheduler.submit([spec("a", 17, max_new_tokens=1)])
    seen: list[list[str]] = []
    for _ in range(4):
        runtime.step()
        seen.append(names_of(scheduler.drain_prefix_events()))
    assert seen == [[], ["stored"] * 2, ["stored"] * 2, []]


@pytest.mark.behaviour("P1")
def test_generated_tokens_are_announced_too() -> None:
    scheduler = scheduler_with_events()
    serve(scheduler, spec("a", 3, max_new_tokens=6))
    router = Router()
    router.drain(scheduler)
    assert list(router.stored) == hashes_of([0, 1, 2, 1003, 1004, 1005, 1006, 1007])


@pytest.mark.behaviour("P1")
def test_beside_a_state_group_the_boundaries_with_a_snapshot_are_announced() -> None:
    scheduler = scheduler_with_events(cache_groups=[full_group(), state_group()], num_lcm_blocks=32, token_budget=8)
    serve(scheduler, spec("a", 26, max_new_tokens=1))
    router = Router()
    router.drain(scheduler)
    assert list(router.stored) == [hashes_of(range(26))[5]]
    scheduler.submit([spec("b", range(27), max_new_tokens=1)])
    assert scheduler.next_plan().admissions[0].device_hit_tokens == 24


@pytest.mark.behaviour("P1")
def test_beside_a_window_the_grains_that_a_hit_reads_are_announced() -> None:
    groups = [full_group(), sliding_group(window_tokens=9)]
    scheduler = scheduler_with_events(cache_groups=groups, num_lcm_blocks=32)
    serve(scheduler, spec("a", 17, max_new_tokens=1))
    router = Router()
    router.drain(scheduler)
    assert list(router.stored) == hashes_of(range(16))[2:]


@pytest.mark.behaviour("P1")
def test_a_replayable_group_does_not_count() -> None:
    groups = [full_group(), sliding_group(window_tokens=4, replayable=True)]
    scheduler = scheduler_with_events(cache_groups=groups, num_lcm_blocks=32)
    serve(scheduler, spec("a", 17, max_new_tokens=1))
    router = Router()
    router.drain(scheduler)
    assert list(router.stored) == hashes_of(range(16))


@pytest.mark.behaviour("P2")
def test_failed_admissions_and_aborted_requests_announce_nothing() -> None:
    scheduler = scheduler_with_events(num_lcm_blocks=4)
    scheduler.submit([spec("a", 8, max_new_tokens=4), spec("b", range(50, 60), max_new_tokens=4)])
    runtime = Runtime(scheduler)
    runtime.step()  # b does not fit beside a
    scheduler.advance([sc.AbortEvent("a"), sc.AbortEvent("b")])
    runtime.plan()
    assert scheduler.drain_prefix_events() == []


@pytest.mark.behaviour("P4")
def test_a_drain_empties_the_list() -> None:
    scheduler = scheduler_with_events()
    serve(scheduler, spec("a", 9))
    assert names_of(scheduler.drain_prefix_events()) == ["stored"] * 3
    assert scheduler.drain_prefix_events() == []


@pytest.mark.behaviour("P4")
def test_a_drain_reports_the_net_change_removals_leaf_first_then_stores_parent_first() -> None:
    scheduler = scheduler_with_events(num_lcm_blocks=7)
    router = Router()
    serve(scheduler, spec("a", 12, max_new_tokens=1))
    assert names_of(router.drain(scheduler)) == ["stored"] * 3
    serve(scheduler, spec("b", range(50, 62), max_new_tokens=1))
    serve(scheduler, spec("c", range(70, 82), max_new_tokens=1))
    events = router.drain(scheduler)
    of_b, of_c = hashes_of(range(50, 62)), hashes_of(range(70, 82))
    assert [(type(event), event.hash) for event in events if not isinstance(event, sc.PrefixCleared)] == [
        *((sc.PrefixRemoved, each) for each in reversed(hashes_of(range(12)))),
        *((sc.PrefixStored, each) for pair in zip(of_b, of_c, strict=True) for each in pair),
    ]


@pytest.mark.behaviour("P5")
def test_an_equal_prompt_says_nothing() -> None:
    scheduler = scheduler_with_events()
    scheduler.submit([spec("a", 9, max_new_tokens=1), spec("b", 9, max_new_tokens=1)])
    runtime = Runtime(scheduler)
    runtime.run_until_idle()
    runtime.finish("a", "b")
    assert names_of(scheduler.drain_prefix_events()) == ["stored"] * 2
    serve(scheduler, spec("c", 9, max_new_tokens=1))
    assert scheduler.drain_prefix_events() == []


def test_a_clear_is_one_event_that_supersedes_what_is_pending() -> None:
    scheduler = scheduler_with_events()
    serve(scheduler, spec("a", 9))
    scheduler.drain_prefix_events()
    serve(scheduler, spec("b", range(50, 59)))
    assert scheduler.clear_cache()
    assert names_of(scheduler.drain_prefix_events()) == ["cleared"]
    serve(scheduler, spec("c", 9, max_new_tokens=1))
    assert names_of(scheduler.drain_prefix_events()) == ["stored"] * 2


def test_a_refused_clear_says_nothing() -> None:
    scheduler = scheduler_with_events()
    scheduler.submit([spec("a", 9)])
    assert not scheduler.clear_cache()
    assert scheduler.drain_prefix_events() == []


@pytest.mark.behaviour("P5")
def test_without_events_nothing_is_reported() -> None:
    scheduler = sc.Scheduler(scheduler_config())
    serve(scheduler, spec("a", 9))
    assert scheduler.clear_cache()
    assert scheduler.drain_prefix_events() == []


def test_events_keep_their_tokens_when_the_scheduler_is_gone() -> None:
    scheduler = scheduler_with_events()
    serve(scheduler, spec("a", 9, max_new_tokens=1))
    event = scheduler.drain_prefix_events()[0]
    del scheduler
    assert isinstance(event, sc.PrefixStored)
    tokens = event.tokens
    del event
    assert tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("role", [sc.Role.PREFILL, sc.Role.DECODE])
def test_plans_do_not_depend_on_events(role: sc.Role) -> None:
    dumps = []
    for enable_prefix_events in (False, True):
        scheduler = sc.Scheduler(scheduler_config(role, enable_prefix_events=enable_prefix_events, token_budget=8))
        scheduler.submit([spec("a", 17, local_prefill=True), spec("b", 9, local_prefill=True)])
        for _ in range(6):
            Runtime(scheduler).step()
        dumps.append(scheduler.describe())
        scheduler.drain_prefix_events()
    assert dumps[0] == dumps[1]


def test_they_can_be_asked_for_later_but_not_from_the_middle() -> None:
    scheduler = sc.Scheduler(scheduler_config())
    scheduler.track_prefix_events(with_extra_keys=True)
    serve(scheduler, spec("a", 9, max_new_tokens=1))
    assert names_of(scheduler.drain_prefix_events()) == ["stored", "stored"]
    late = sc.Scheduler(scheduler_config())
    serve(late, spec("a", 9, max_new_tokens=1))
    assert late.drain_prefix_events() == []
    with pytest.raises(sc.ContractError, match="a request was submitted before"):
        late.track_prefix_events(with_extra_keys=True)


@pytest.mark.parametrize("with_extra_keys", [True, False])
def test_prompts_with_extra_keys_are_left_out_where_nobody_is_to_hear_of_them(with_extra_keys: bool) -> None:
    scheduler = sc.Scheduler(scheduler_config(num_lcm_blocks=8))
    scheduler.track_prefix_events(with_extra_keys=with_extra_keys)
    salted = sc.RequestSpec(request_id="salted", tokens=list(range(9)), max_new_tokens=1, extra_keys=[b"salt"])
    serve(scheduler, salted)
    assert names_of(scheduler.drain_prefix_events()) == ["stored", "stored"] * with_extra_keys
    # What is evicted of it, by a prompt that takes all blocks, is not told either.
    serve(scheduler, spec("large", list(range(100, 130)), max_new_tokens=1))
    assert names_of(scheduler.drain_prefix_events()) == ["removed"] * 2 * with_extra_keys + ["stored"] * 7
    assert scheduler.clear_cache()
    assert names_of(scheduler.drain_prefix_events()) == ["cleared"]


@pytest.mark.parametrize("with_extra_keys", [True, False])
def test_what_storage_brings_back_of_them_is_left_out_as_well(with_extra_keys: bool) -> None:
    scheduler = sc.Scheduler(scheduler_config(num_host_lcm_blocks=8, enable_storage=True))
    scheduler.track_prefix_events(with_extra_keys=with_extra_keys)
    tokens = list(range(9))
    scheduler.register_storage_keys(
        [
            sc.StorageKey(group=0, digest=digest, grain_offset=0)
            for digest in sc.hash_grains(np.array(tokens, dtype=np.int32), 4, [b"salt"])
        ]
    )
    runtime = Runtime(scheduler)
    scheduler.submit([sc.RequestSpec(request_id="a", tokens=tokens, max_new_tokens=1, extra_keys=[b"salt"])])
    plan = runtime.plan()
    (admission,) = plan.admissions
    assert admission.storage_hit_tokens == 8
    assert scheduler.drain_prefix_events() == []
    runtime.land(plan)
    scheduler.advance([sc.LoadDoneEvent(load.operation_id) for load in plan.loads])
    assert names_of(scheduler.drain_prefix_events()) == ["stored", "stored"] * with_extra_keys
