"""The host tier through the scheduler: what is copied when, what a transfer holds, and who waits for it."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, scheduler_config, sliding_group, spec, state_group


def runtime_of(role: sc.Role = sc.Role.FUSED, *, num_host_lcm_blocks: int = 40, **fields: object) -> Runtime:
    return Runtime(sc.Scheduler(scheduler_config(role, num_host_lcm_blocks=num_host_lcm_blocks, **fields)))  # type: ignore[arg-type]


def stored_slots(plan: sc.Plan, *, pinned: bool = True) -> list[tuple[int, int]]:
    """(group, source block) of the copies to the host."""
    stores = [store for store in plan.stores if store.is_pinned == pinned]
    return [(group, source) for store in stores for group, source, _ in store.copies.tolist()]


def acknowledge(runtime: Runtime, plan: sc.Plan) -> None:
    runtime.scheduler.advance([sc.StoreDoneEvent(store.operation_id) for store in plan.stores])
    runtime.scheduler.advance([sc.LoadDoneEvent(load.operation_id) for load in plan.loads])


def step(runtime: Runtime) -> sc.Plan:
    plan = runtime.step()
    acknowledge(runtime, plan)
    return plan


def run_once(runtime: Runtime, request: sc.RequestSpec) -> None:
    """Runs a request to its end and drops it from the device."""
    runtime.scheduler.submit([request])
    for _ in range(40):
        if step(runtime).num_rows == 0:
            break
    acknowledge(runtime, runtime.finish(request.request_id))
    assert runtime.scheduler.clear_device_cache()


@pytest.mark.behaviour("C6")
def test_a_storage_tier_needs_a_host_tier() -> None:
    with pytest.raises(sc.ConfigError, match="enable_storage needs a host tier, num_host_lcm_blocks is 0"):
        scheduler_config(enable_storage=True).validate()
    with pytest.raises(sc.ConfigError, match="num_host_lcm_blocks must be at least 0, got -1"):
        scheduler_config(num_host_lcm_blocks=-1).validate()
    scheduler_config(sc.Role.DECODE, num_host_lcm_blocks=0).validate()
    with pytest.raises(sc.ConfigError, match=r"with num_host_lcm_blocks 2147483647 exceeds int32 block ids"):
        scheduler_config(num_host_lcm_blocks=2**31 - 1).validate()


@pytest.mark.behaviour("N12")
def test_the_size_of_the_host_changes_no_limit_of_the_device() -> None:
    groups = [full_group(), state_group()]
    bounds = [
        sc.Scheduler(scheduler_config(cache_groups=groups, num_host_lcm_blocks=size)).max_request_tokens
        for size in (0, 1, 1000)
    ]
    assert len(set(bounds)) == 1


@pytest.mark.behaviour("N2")
@pytest.mark.parametrize("role", [sc.Role.FUSED, sc.Role.PREFILL])
def test_prompts_are_copied_as_their_chunks_are_published(role: sc.Role) -> None:
    runtime = runtime_of(role, token_budget=8, cache_groups=[full_group(), state_group()])
    runtime.scheduler.submit([spec("a", 18)])
    assert not step(runtime).stores  # nothing is published yet
    plan = step(runtime)
    assert [group for group, _ in stored_slots(plan)] == [0, 0]  # a chance boundary: its state is not
    plan = step(runtime)
    assert [group for group, _ in stored_slots(plan)] == [0, 0, 1]  # the last boundary of the prompt: its state too
    assert not step(runtime).stores


@pytest.mark.behaviour("N2")
@pytest.mark.behaviour("H19")
@pytest.mark.parametrize("role", [sc.Role.FUSED, sc.Role.PREFILL])
def test_what_the_last_chunk_left_is_copied_before_decode_or_hand_over(role: sc.Role) -> None:
    runtime = runtime_of(role, cache_groups=[full_group(), state_group()])
    runtime.scheduler.submit([spec("a", 9)])
    assert not step(runtime).stores
    assert [group for group, _ in stored_slots(step(runtime))] == [0, 0, 1]


@pytest.mark.behaviour("N2")
def test_decode_copies_windows_and_nothing_that_is_kept_whole() -> None:
    runtime = runtime_of(num_lcm_blocks=40, cache_groups=[full_group(), sliding_group(window_tokens=5), state_group()])
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=12)])
    step(runtime)
    step(runtime)  # the first decode step copies the prompt
    groups = [group for _ in range(9) for group, _ in stored_slots(step(runtime))]
    assert groups == [1, 1]  # one window block for each grain that filled


@pytest.mark.behaviour("N3")
def test_an_end_copies_what_is_still_missing() -> None:
    runtime = runtime_of()
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=5)])
    plans = [step(runtime) for _ in range(6)]
    assert [len(stored_slots(plan)) for plan in plans] == [0, 2, 0, 0, 0, 0]
    assert len(stored_slots(runtime.finish("a"))) == 1  # the grain that decode filled


@pytest.mark.behaviour("N3")
def test_an_abort_copies_nothing_more() -> None:
    runtime = runtime_of()
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=5)])
    step(runtime)
    runtime.scheduler.advance([sc.AbortEvent("a")])
    assert not runtime.plan().stores


@pytest.mark.behaviour("N3")
def test_the_decode_role_copies_only_what_a_retraction_would_lose() -> None:
    runtime = runtime_of(sc.Role.DECODE, cache_groups=[full_group(), sliding_group(window_tokens=5)])
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=6)])
    runtime.scheduler.advance([sc.ReadyEvent("a")])
    runtime.plan()
    runtime.scheduler.advance([sc.DoneEvent("a", 7)])
    assert not any(step(runtime).stores for _ in range(5))
    assert not runtime.finish("a").stores


@pytest.mark.behaviour("N5")
def test_what_has_no_place_on_the_host_is_left_out_silently() -> None:
    runtime = runtime_of(num_host_lcm_blocks=4, num_lcm_blocks=40)
    runtime.scheduler.submit([spec("a", 24)])
    runtime.step()
    plan = runtime.step()
    assert [len(store.copies) for store in plan.stores] == [4]
    assert runtime.scheduler.capacity().active_host_lcm_blocks == 4
    acknowledge(runtime, plan)
    assert runtime.scheduler.capacity().cached_host_lcm_blocks == 4


@pytest.mark.behaviour("F1")
@pytest.mark.behaviour("I8")
@pytest.mark.behaviour("G16")
def test_a_host_hit_counts_as_computed_and_is_loaded_with_the_first_chunk() -> None:
    runtime = runtime_of(token_budget=8, num_lcm_blocks=40)
    run_once(runtime, spec("a", 17, max_new_tokens=1))
    runtime.scheduler.submit([spec("b", 33, max_new_tokens=1)])
    plan = runtime.plan()
    (admission,) = plan.admissions
    assert (admission.device_hit_tokens, admission.host_hit_tokens, admission.storage_hit_tokens) == (0, 16, 0)
    assert rows_of(plan) == [("b", 16, 8)]
    (load,) = plan.loads
    assert load.copies[:, 2].tolist() == plan.block_tables[0][0].tolist()[:4]
    assert not set(load.copies[:, 2].tolist()) & set(plan.zero_blocks[0].tolist())
    assert load.reads_storage.tolist() == [0, 0, 0, 0]
    runtime.land(plan)
    assert rows_of(step(runtime)) == [("b", 24, 8)]


@pytest.mark.behaviour("N12")
def test_a_later_equal_prompt_is_copied_no_second_time() -> None:
    runtime = runtime_of(num_lcm_blocks=40)
    run_once(runtime, spec("a", 17))
    runtime.scheduler.submit([spec("b", 17)])
    plans = [step(runtime) for _ in range(4)] + [runtime.finish("b")]
    assert not any(plan.stores for plan in plans)


@pytest.mark.behaviour("N9")
def test_an_abort_returns_the_loading_blocks_when_they_are_loaded() -> None:
    runtime = runtime_of(num_lcm_blocks=8)
    run_once(runtime, spec("a", 17, max_new_tokens=1))
    runtime.scheduler.submit([spec("b", 20, max_new_tokens=1)])
    plan = runtime.plan()
    assert runtime.scheduler.capacity().empty_lcm_blocks == 2
    runtime.scheduler.advance([sc.AbortEvent("b")])
    gauges = runtime.scheduler.capacity()
    assert (gauges.empty_lcm_blocks, gauges.active_lcm_blocks) == (4, 4)
    assert not runtime.scheduler.can_clear()
    acknowledge(runtime, plan)
    gauges = runtime.scheduler.capacity()
    assert (gauges.empty_lcm_blocks, gauges.active_lcm_blocks, gauges.cached_lcm_blocks) == (4, 0, 4)


@pytest.mark.behaviour("N10")
@pytest.mark.behaviour("M7")
def test_nobody_gives_way_while_a_load_is_under_way() -> None:
    runtime = runtime_of(num_lcm_blocks=8)
    run_once(runtime, spec("a", 9, max_new_tokens=1))
    runtime.scheduler.submit([spec("b", 9, max_new_tokens=None)])
    loading = runtime.plan()
    assert loading.loads
    runtime.land(loading)
    runtime.step()
    runtime.scheduler.submit([spec("c", range(50, 76), max_new_tokens=None)])
    for _ in range(3):
        plan = runtime.step()
        runtime.scheduler.advance([sc.StoreDoneEvent(store.operation_id) for store in plan.stores])
        assert not plan.retracted
        assert rows_of(plan)
    runtime.scheduler.advance([sc.LoadDoneEvent(loading.loads[0].operation_id)])
    assert runtime.plan().retracted == ["b"]


@pytest.mark.behaviour("M7")
def test_a_pinned_store_puts_a_retraction_off_and_no_further_one_begins() -> None:
    runtime = runtime_of(num_lcm_blocks=6, cache_groups=[full_group()])
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    runtime.step()
    storing = runtime.step()
    assert storing.stores
    runtime.scheduler.submit([spec("b", range(50, 70), max_new_tokens=None)])
    plans = [runtime.step() for _ in range(5)]
    assert not any(plan.retracted or plan.stores for plan in plans)
    acknowledge(runtime, storing)
    plan = runtime.plan()
    assert plan.retracted == ["a"]
    assert [admission.request_id for admission in plan.admissions] == ["b"]


@pytest.mark.behaviour("M10")
@pytest.mark.behaviour("M11")
def test_a_retracted_request_is_copied_ahead_and_its_blocks_are_granted_in_the_same_plan() -> None:
    runtime = runtime_of(num_lcm_blocks=6)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    for _ in range(6):
        step(runtime)  # thirteen tokens, of which twelve are computed
    table = runtime.scheduler.block_tables("a")[0].tolist()
    runtime.scheduler.submit([spec("b", range(50, 70), max_new_tokens=None)])
    plan = runtime.plan()
    assert plan.retracted == ["a"]
    assert rows_of(plan) == [("b", 0, 20)]
    (store,) = plan.stores
    assert not store.is_pinned
    assert store.copies[:, 1].tolist() == [table[2]]  # the prompt's grains are on the host already
    assert set(plan.zero_blocks[0].tolist()) & set(table)
    runtime.land(plan)
    acknowledge(runtime, plan)
    acknowledge(runtime, runtime.finish("b"))
    assert runtime.scheduler.capacity().cached_host_lcm_blocks >= 3


@pytest.mark.behaviour("N12")
@pytest.mark.parametrize("num_host_lcm_blocks", [0, 40])
def test_a_recovery_loads_its_own_snapshot_without_a_prefix_cache(num_host_lcm_blocks: int) -> None:
    runtime = runtime_of(num_lcm_blocks=6, enable_prefix_cache=False, num_host_lcm_blocks=num_host_lcm_blocks)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    for _ in range(6):
        assert not step(runtime).stores  # nothing is kept for others
    runtime.scheduler.submit([spec("b", range(50, 70), max_new_tokens=None)])
    plan = runtime.plan()
    assert plan.retracted == ["a"]
    assert [len(store.copies) for store in plan.stores] == ([3] if num_host_lcm_blocks else [])
    runtime.land(plan)
    acknowledge(runtime, plan)
    (admission,) = runtime.finish("b").admissions
    hit_tokens = admission.device_hit_tokens + admission.host_hit_tokens
    assert (admission.request_id, hit_tokens) == ("a", 12 if num_host_lcm_blocks else 0)


@pytest.mark.behaviour("M14")
@pytest.mark.parametrize("num_host_lcm_blocks", [0, 40])
def test_with_a_host_a_fused_request_that_gave_way_comes_before_new_ones(num_host_lcm_blocks: int) -> None:
    runtime = runtime_of(num_lcm_blocks=6, num_host_lcm_blocks=num_host_lcm_blocks)
    runtime.scheduler.submit([spec("old", range(80, 100), max_new_tokens=None)])  # waits behind what runs
    runtime.scheduler.advance([sc.AbortEvent("old")])
    runtime.scheduler.submit([spec("big", range(30, 50), max_new_tokens=0)])
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    runtime.scheduler.advance([sc.AbortEvent("big")])
    for _ in range(6):
        step(runtime)
    runtime.scheduler.submit([spec("b", range(50, 70), max_new_tokens=None)])
    plan = step(runtime)
    assert plan.retracted == ["a"]
    runtime.scheduler.submit([spec("c", range(100, 104), max_new_tokens=0)])
    plan = step(runtime)
    assert [admission.request_id for admission in plan.admissions] == ([] if num_host_lcm_blocks else ["c"])


@pytest.mark.behaviour("N8")
def test_a_window_that_is_being_copied_makes_the_next_chunk_wait_quietly() -> None:
    groups = [sliding_group(window_tokens=5)]
    runtime = runtime_of(num_lcm_blocks=4, token_budget=4, cache_groups=groups, max_batch_size=2, num_host_lcm_blocks=8)
    runtime.scheduler.submit([spec("a", 24, max_new_tokens=1)])
    plans: list[sc.Plan] = []
    for _ in range(6):
        plans.append(runtime.step())
        if not rows_of(plans[-1]):
            break
    assert not rows_of(plans[-1])
    assert not any(plan.retracted for plan in plans)
    assert rows_of(plans[-2])
    for plan in plans:
        acknowledge(runtime, plan)
    begin = int(plans[-2].begins[0] + plans[-2].input_lengths[0])
    assert rows_of(runtime.plan()) == [("a", begin, 4)]


@pytest.mark.behaviour("N11")
@pytest.mark.behaviour("O11")
def test_clearing_the_device_leaves_the_host_and_clearing_both_leaves_nothing() -> None:
    runtime = runtime_of()
    runtime.scheduler.submit([spec("a", 9, max_new_tokens=1)])
    runtime.step()
    runtime.scheduler.advance([sc.FinishEvent("a")])
    plan = runtime.plan()
    assert plan.stores
    before = runtime.scheduler.describe()
    assert not runtime.scheduler.can_clear()
    assert not runtime.scheduler.clear_cache()
    assert not runtime.scheduler.clear_device_cache()
    assert runtime.scheduler.describe() == before
    acknowledge(runtime, plan)
    assert runtime.scheduler.can_clear()
    assert runtime.scheduler.clear_device_cache()
    gauges = runtime.scheduler.capacity()
    assert gauges.empty_lcm_blocks == gauges.total_lcm_blocks
    assert gauges.cached_host_lcm_blocks == 2
    assert runtime.scheduler.clear_cache()
    gauges = runtime.scheduler.capacity()
    assert gauges.empty_host_lcm_blocks == gauges.total_host_lcm_blocks


@pytest.mark.behaviour("I7")
def test_operation_ids_rise_and_arrays_outlive_their_operation() -> None:
    runtime = runtime_of(num_lcm_blocks=40)
    run_once(runtime, spec("a", 17, max_new_tokens=1))
    runtime.scheduler.submit([spec("b", 25, max_new_tokens=3)])
    plan = runtime.plan()
    copies, keys = plan.loads[0].copies, plan.loads[0].keys
    operation_id = plan.loads[0].operation_id
    runtime.land(plan)
    acknowledge(runtime, plan)
    del plan
    assert copies.shape == (4, 3)
    assert len(set(keys)) == 4
    assert keys == [
        sc.StorageKey(group=0, digest=digest, grain_offset=0) for digest in sc.hash_grains(list(range(16)), 4)
    ]
    assert min(store.operation_id for store in runtime.step().stores) > operation_id


@pytest.mark.behaviour("T3")
def test_late_acknowledgements_change_nothing() -> None:
    runtime = runtime_of()
    run_once(runtime, spec("a", 9, max_new_tokens=1))
    before = runtime.scheduler.describe()
    runtime.scheduler.advance([sc.StoreDoneEvent(number) for number in range(9)])
    runtime.scheduler.advance([sc.LoadDoneEvent(number, False) for number in range(9)])
    assert runtime.scheduler.describe() == before


@pytest.mark.behaviour("M19")
def test_waiting_for_a_copy_is_no_stall() -> None:
    runtime = runtime_of(num_lcm_blocks=4, token_budget=4, cache_groups=[sliding_group(window_tokens=5)])
    runtime.scheduler.submit([spec("a", 24, max_new_tokens=1)])
    for _ in range(2000):
        assert runtime.step().num_stalled_plans == 0


@pytest.mark.behaviour("F4")
def test_a_blocked_prompt_is_looked_up_again_when_storage_has_what_it_lacks() -> None:
    groups = [full_group(), state_group()]
    runtime = runtime_of(num_lcm_blocks=13, token_budget=8, cache_groups=groups, enable_storage=True)
    runtime.scheduler.submit([spec("first", 18, max_new_tokens=4)])
    step(runtime)
    step(runtime)  # two grains are on the device and on the host, and no state is published at their end
    runtime.scheduler.submit([spec("second", 10, max_new_tokens=1)])
    assert not step(runtime).admissions  # without a hit it does not fit beside the first
    digests = sc.hash_grains(list(range(8)), 4, [])
    assert not step(runtime).admissions
    runtime.scheduler.register_storage_keys([sc.StorageKey(group=1, digest=digests[-1], grain_offset=0)])
    (admission,) = runtime.plan().admissions  # behind the state it claims the blocks of the first
    assert (admission.device_hit_tokens, admission.host_hit_tokens, admission.storage_hit_tokens) == (0, 4, 4)
