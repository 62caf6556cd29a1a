"""Random histories, checked after every step: the books balance, and the same history gives the same plans."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler_core as sc

from .builders import full_group, scheduler_config, sliding_group, spec, state_group
from .checked_driver import play
from .random_settings import Setting, settings_with

GROUP_MIXES = (
    [full_group("only", block_granularity=4)],
    [full_group("packed", block_granularity=2, cache_blocks_per_lcm_block=3)],
    [
        full_group("coarse", block_granularity=4),
        full_group("fine", block_granularity=1, cache_blocks_per_lcm_block=5),
    ],
    [full_group(), sliding_group(window_tokens=5, block_granularity=2, cache_blocks_per_lcm_block=3)],
    [
        sliding_group("near", window_tokens=2, block_granularity=1, cache_blocks_per_lcm_block=4),
        full_group(),
        sliding_group("far", window_tokens=10),
    ],
    [full_group(), state_group(block_granularity=2, cache_blocks_per_lcm_block=2)],
    [full_group(), sliding_group(window_tokens=4, block_granularity=2), state_group(block_granularity=1)],
    [full_group(), sliding_group(window_tokens=4, block_granularity=2, replayable=True)],
    [
        full_group("sharded", block_granularity=2, cache_blocks_per_lcm_block=4, shard_count=2),
        sliding_group(window_tokens=5),
    ],
)


@pytest.mark.behaviour("A10", "B2", "I7", "T5")
@settings(max_examples=120)
@given(
    setting=settings_with(GROUP_MIXES, verify_width=3, host_lcm_blocks=[0, 4, 20]),
    seed=st.integers(0, 2**32),
    num_moves=st.integers(1, 250),
)
def test_every_history_keeps_the_books_and_comes_to_rest(setting: Setting, seed: int, num_moves: int) -> None:
    play(setting, seed, num_moves).come_to_rest()


@pytest.mark.behaviour("T4")
def test_equal_histories_give_equal_plans() -> None:
    for role in (sc.Role.FUSED, sc.Role.PREFILL, sc.Role.DECODE):
        for groups in (GROUP_MIXES[2], GROUP_MIXES[-1]):
            alone, tiered = (Setting(role=role, groups=groups, num_host_lcm_blocks=number) for number in (0, 8))
            logs = [play(setting, 11, 300, is_checked=False).log for setting in (alone, alone, tiered, tiered)]
            assert logs[0] == logs[1]
            assert logs[2] == logs[3] != logs[0]
            assert sum("r1" in line for line in logs[0]) > 0


def test_the_histories_make_requests_give_way() -> None:
    for role in (sc.Role.FUSED, sc.Role.DECODE):
        setting = Setting(role=role, groups=GROUP_MIXES[0])
        retractions = (play(setting, seed, 600).num_retracted for seed in range(12))
        assert any(total > 10 for total in accumulate(retractions))


@pytest.mark.behaviour("J1")
def test_requests_of_one_size_start_in_the_order_they_came() -> None:
    scheduler = sc.Scheduler(scheduler_config(num_lcm_blocks=9, max_batch_size=3, token_budget=9))
    names = [f"{(number * 7919) % 97:02d}" for number in range(40)]
    scheduler.submit([spec(name, [int(name) * 10 + i for i in range(6)], max_new_tokens=3) for name in names])
    started: list[str] = []
    for _ in range(2000):
        plan = scheduler.next_plan()
        started += [admission.request_id for admission in plan.admissions]
        pairs = zip(plan.request_ids, plan.logits_wanted.tolist(), strict=True)
        scheduler.advance([sc.ResultEvent(request_id, [1] * wanted) for request_id, wanted in pairs])
        complete = [line.split()[1] for line in scheduler.describe().splitlines() if "tokens=6+3" in line]
        scheduler.advance([sc.FinishEvent(request_id) for request_id in complete])
    assert started == names
