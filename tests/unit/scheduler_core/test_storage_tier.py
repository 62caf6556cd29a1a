"""Storage behind the host tier, through the scheduler: what it is asked for, what is read, and what a miss costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, sliding_group, spec


def runtime_of(role: sc.Role = sc.Role.FUSED, *, num_host_lcm_blocks: int = 40, **fields: object) -> Runtime:
    config = scheduler_config(role, num_host_lcm_blocks=num_host_lcm_blocks, enable_storage=True, **fields)  # type: ignore[arg-type]
    return Runtime(sc.Scheduler(config))


def keys_of(tokens: Sequence[int], *, num_groups: int = 1) -> list[sc.StorageKey]:
    """Keys of groups with one block per grain of four tokens, front first."""
    return [
        sc.StorageKey(group=group, digest=digest, grain_offset=0)
        for digest in sc.hash_grains(list(tokens), 4)
        for group in range(num_groups)
    ]


@pytest.mark.behaviour("O10")
def test_storage_is_asked_for_prompts_that_can_be_admitted() -> None:
    runtime = runtime_of(num_lcm_blocks=8, token_budget=64)
    prompts = [range(10 * start, 10 * start + 9) for start in (0, 10, 20)]
    runtime.scheduler.submit([spec(f"r{start}", tokens, max_new_tokens=3) for start, tokens in enumerate(prompts)])
    assert runtime.scheduler.storage_queries() == keys_of(prompts[0][:8]) + keys_of(prompts[1][:8])
    runtime.step()
    assert runtime.scheduler.storage_queries() == []


@pytest.mark.behaviour("O10")
def test_a_prompt_behind_an_incomplete_one_is_not_asked_for() -> None:
    runtime = runtime_of(num_lcm_blocks=40, token_budget=8)
    runtime.scheduler.submit([spec("long", 30), spec("next", range(100, 109))])
    assert runtime.scheduler.storage_queries() == keys_of(range(28))
    runtime.step()
    assert runtime.scheduler.storage_queries() == []


@pytest.mark.behaviour("O1")
def test_without_storage_nothing_is_asked_for_or_kept() -> None:
    scheduler = sc.Scheduler(scheduler_config(num_host_lcm_blocks=4))
    scheduler.submit([spec("a", 9)])
    assert scheduler.storage_queries() == []
    scheduler.register_storage_keys(keys_of(range(8)))
    (admission,) = scheduler.next_plan().admissions
    assert admission.storage_hit_tokens == 0


@pytest.mark.behaviour("O3")
@pytest.mark.behaviour("I8")
def test_a_known_key_is_read_into_the_host_and_loaded() -> None:
    runtime = runtime_of()
    runtime.scheduler.register_storage_keys(keys_of(range(8)))
    runtime.scheduler.submit([spec("a", 10)])
    plan = runtime.plan()
    (admission,) = plan.admissions
    assert (admission.device_hit_tokens, admission.host_hit_tokens, admission.storage_hit_tokens) == (0, 0, 8)
    (load,) = plan.loads
    assert load.reads_storage.tolist() == [1, 1]
    assert load.keys == keys_of(range(8))
    assert rows_of(plan) == [("a", 8, 2)]


@pytest.mark.behaviour("O4")
def test_what_storage_fills_is_hit_by_nobody_before_it_is_there() -> None:
    runtime = runtime_of(num_lcm_blocks=40)
    runtime.scheduler.register_storage_keys(keys_of(range(8)))
    runtime.scheduler.submit([spec("a", 10), spec("b", 10)])
    plan = runtime.plan()
    assert [admission.device_hit_tokens for admission in plan.admissions] == [0, 0]
    runtime.land(plan)
    runtime.scheduler.advance([sc.LoadDoneEvent(load.operation_id) for load in plan.loads])
    runtime.scheduler.submit([spec("c", 10)])
    (admission,) = runtime.plan().admissions
    assert admission.device_hit_tokens == 8


@pytest.mark.behaviour("O5")
@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_a_miss_makes_all_rows_of_the_plan_start_over_and_nobody_fails(overlap_depth: int) -> None:
    runtime = runtime_of(num_lcm_blocks=40, overlap_depth=overlap_depth)
    runtime.scheduler.submit([spec("running", range(50, 59), max_new_tokens=9)])
    runtime.step()
    runtime.step()
    runtime.scheduler.register_storage_keys(keys_of(range(8)))
    runtime.scheduler.submit([spec("reads", 10, max_new_tokens=1)])
    plan = runtime.plan()
    assert sorted(plan.request_ids) == ["reads", "running"]
    (load,) = plan.loads
    runtime.scheduler.advance([sc.LoadDoneEvent(load.operation_id, False, [keys_of(range(8))[1]])])
    admissions: list[sc.Admission] = []
    for _ in range(2):
        again = runtime.step()
        runtime.scheduler.advance([sc.LoadDoneEvent(load.operation_id) for load in again.loads])
        admissions += again.admissions
    assert [(each.request_id, each.device_hit_tokens) for each in admissions] == [("running", 8), ("reads", 0)]
    assert admissions[1].storage_hit_tokens == 4


@pytest.mark.behaviour("O5")
@pytest.mark.behaviour("L16")
def test_a_local_recovery_of_the_decode_role_reads_from_the_tiers_too() -> None:
    runtime = runtime_of(sc.Role.DECODE)
    runtime.scheduler.submit([spec("a", 10, max_new_tokens=1, local_prefill=True)])
    assert runtime.scheduler.storage_queries() == keys_of(range(8))
    runtime.scheduler.register_storage_keys(keys_of(range(8)))
    plan = runtime.plan()
    (load,) = plan.loads
    assert not plan.remote_prefills
    runtime.scheduler.advance([sc.LoadDoneEvent(load.operation_id, False, keys_of(range(8)))])
    plan = runtime.plan()
    assert (rows_of(plan), list(plan.loads)) == ([("a", 0, 10)], [])


@pytest.mark.behaviour("O5")
def test_a_failure_must_be_reported_in_time_and_behind_older_results() -> None:
    runtime = runtime_of(num_lcm_blocks=40, overlap_depth=1)
    runtime.scheduler.submit([spec("running", range(50, 59), max_new_tokens=9)])
    runtime.step()
    older = runtime.plan()
    runtime.scheduler.register_storage_keys(keys_of(range(8)))
    runtime.scheduler.submit([spec("reads", 10, max_new_tokens=1)])
    plan = runtime.plan()
    failure = sc.LoadDoneEvent(plan.loads[0].operation_id, False, keys_of(range(8)))
    before = runtime.scheduler.describe()
    with pytest.raises(sc.ContractError, match='request "running" has 2 results out'):
        runtime.scheduler.advance([failure])
    assert runtime.scheduler.describe() == before
    runtime.land(older)
    runtime.scheduler.next_plan()
    with pytest.raises(sc.ContractError, match="before the next plan is asked for"):
        runtime.scheduler.advance([failure])


@pytest.mark.behaviour("O5")
def test_an_ended_request_of_a_failed_plan_stays_ended() -> None:
    runtime = runtime_of()
    runtime.scheduler.register_storage_keys(keys_of(range(8)))
    runtime.scheduler.submit([spec("a", 10)])
    plan = runtime.plan()
    failure = sc.LoadDoneEvent(plan.loads[0].operation_id, False, keys_of(range(8)))
    runtime.scheduler.advance([sc.AbortEvent("a"), failure, failure])
    assert runtime.plan().finished == ["a"]
    gauges = runtime.scheduler.capacity()
    assert (gauges.empty_lcm_blocks, gauges.empty_host_lcm_blocks) == (16, 40)


@pytest.mark.behaviour("O5")
@pytest.mark.behaviour("L11")
def test_on_the_prefill_role_a_read_does_not_run_beside_a_prompt_in_transfer() -> None:
    runtime = runtime_of(sc.Role.PREFILL, num_lcm_blocks=40, token_budget=8)
    runtime.scheduler.submit([spec("sending", range(50, 60))])
    runtime.step()
    runtime.scheduler.register_storage_keys(keys_of(range(8)))
    runtime.scheduler.submit([spec("reads", 10)])
    assert rows_of(runtime.step()) == [("sending", 8, 2)]
    plan = runtime.plan()
    assert rows_of(plan) == [("reads", 8, 2)]
    runtime.scheduler.advance([sc.LoadDoneEvent(plan.loads[0].operation_id, False, keys_of(range(8)))])
    runtime.scheduler.advance([sc.AbortEvent("reads")])  # it holds nothing that a peer could touch
    assert runtime.plan().finished == ["reads"]


@pytest.mark.behaviour("O6")
def test_a_full_host_shortens_the_hit_and_the_chunk_begins_there() -> None:
    runtime = runtime_of(
        num_host_lcm_blocks=5, num_lcm_blocks=40, token_budget=8, cache_groups=[full_group(), full_group("b")]
    )
    runtime.scheduler.register_storage_keys(keys_of(range(12), num_groups=2))
    runtime.scheduler.submit([spec("a", 30, max_new_tokens=1)])
    plan = runtime.plan()
    (admission,) = plan.admissions
    assert admission.storage_hit_tokens == 8  # six blocks are wanted, four of five make two grains
    assert rows_of(plan) == [("a", 8, 8)]


@pytest.mark.behaviour("O8")
def test_a_missed_key_comes_back_when_a_backup_created_it() -> None:
    runtime = runtime_of()
    keys = keys_of(range(8))
    runtime.scheduler.register_storage_keys(keys)
    runtime.scheduler.submit([spec("a", 10, max_new_tokens=2)])
    plan = runtime.plan()
    runtime.scheduler.advance([sc.LoadDoneEvent(plan.loads[0].operation_id, False, keys[1:])])
    runtime.scheduler.register_storage_keys(keys)
    plan = runtime.step()
    assert plan.admissions[0].storage_hit_tokens == 4
    runtime.scheduler.advance([sc.LoadDoneEvent(plan.loads[0].operation_id)])
    (store,) = runtime.step().stores
    assert store.keys == keys[1:]
    runtime.scheduler.advance([sc.StoreDoneEvent(store.operation_id, keys[1:])])
    runtime.scheduler.advance([sc.FinishEvent("a")])
    runtime.plan()
    assert "storage keys=2 unreadable=0" in runtime.scheduler.describe()


@pytest.mark.behaviour("O9")
def test_a_copy_that_left_the_host_is_still_known_in_storage() -> None:
    runtime = runtime_of(num_host_lcm_blocks=2, num_lcm_blocks=40)
    for name, first in (("a", 0), ("b", 100)):
        runtime.scheduler.submit([spec(name, range(first, first + 9), max_new_tokens=1)])
        runtime.step()
        plan = runtime.finish(name)
        runtime.scheduler.advance([sc.StoreDoneEvent(store.operation_id) for store in plan.stores])
    assert runtime.scheduler.clear_device_cache()
    runtime.scheduler.submit([spec("again", range(9))])
    assert runtime.scheduler.storage_queries() == keys_of(range(8))  # neither tier has it
    runtime.scheduler.register_storage_keys(keys_of(range(8)))  # the bounded shadow may have dropped it
    assert runtime.plan().admissions[0].storage_hit_tokens == 8


@pytest.mark.behaviour("O2")
def test_unregistered_keys_are_no_hits() -> None:
    runtime = runtime_of()
    runtime.scheduler.register_storage_keys(keys_of(range(8)))
    runtime.scheduler.unregister_storage_keys(keys_of(range(8))[1:])
    runtime.scheduler.submit([spec("a", 10)])
    assert runtime.plan().admissions[0].storage_hit_tokens == 4


def test_a_key_that_no_block_can_have_is_refused() -> None:
    scheduler = runtime_of(cache_groups=[full_group(block_granularity=2), sliding_group(window_tokens=4)]).scheduler
    digest = bytes(32)
    for group, grain_offset in ((2, 0), (-1, 0), (0, 2), (1, 1), (0, -1)):
        key = sc.StorageKey(group=group, digest=digest, grain_offset=grain_offset)
        with pytest.raises(sc.ContractError, match=f"storage key of group {group} at grain_offset {grain_offset}"):
            scheduler.register_storage_keys([key])
    with pytest.raises(ValueError, match="digest must have 32 bytes, got 31"):
        sc.StorageKey(group=0, digest=bytes(31), grain_offset=0)
    key = sc.StorageKey(group=1, digest=digest, grain_offset=0)
    assert key == sc.StorageKey(group=1, digest=digest, grain_offset=0)
    assert key != sc.StorageKey(group=0, digest=digest, grain_offset=0)
    assert (key.group, key.digest, key.grain_offset) == (1, digest, 0)
