"""Sizing a pool before it exists."""

from __future__ import annotations

import itertools

import pytest

import scheduler_core as sc

from .builders import full_group, scheduler_config, sliding_group, spec, state_group


@pytest.mark.behaviour("C7")
def test_a_pool_is_sized_from_a_configuration_that_has_no_parents_yet() -> None:
    config = scheduler_config(num_lcm_blocks=0)
    config.validate_sizing()
    model = sc.CapacityModel(config)
    assert model.lcm_blocks(9) == 3
    assert model.max_request_tokens == 0
    with pytest.raises(sc.ConfigError, match="num_lcm_blocks"):
        config.validate()


@pytest.mark.behaviour("C7")
def test_everything_but_the_counts_of_blocks_is_checked_before_sizing() -> None:
    config = scheduler_config(num_lcm_blocks=0, cache_groups=[full_group(block_granularity=3)])
    for check in (config.validate_sizing, config.validate, lambda: sc.CapacityModel(config)):
        with pytest.raises(sc.ConfigError, match=r"block_granularity 3 must divide prefix_granularity 4"):
            check()


@pytest.mark.behaviour("C7")
def test_ids_that_do_not_fit_are_a_matter_of_counts() -> None:
    config = scheduler_config(num_lcm_blocks=2**30, cache_groups=[full_group(cache_blocks_per_lcm_block=8)])
    config.validate_sizing()
    with pytest.raises(sc.ConfigError, match="int32"):
        config.validate()


@pytest.mark.behaviour("K9")
def test_the_bound_is_the_one_the_scheduler_has() -> None:
    config = scheduler_config(cache_groups=[full_group(), sliding_group(window_tokens=9), state_group()])
    assert sc.CapacityModel(config).max_request_tokens == sc.Scheduler(config).max_request_tokens


@pytest.mark.behaviour("K9")
@pytest.mark.parametrize(("granularities", "bound_tokens"), [((2, 2), 8), ((2, 1), 5)])
def test_the_bound_is_the_largest_length_whose_demand_fits(granularities: tuple[int, int], bound_tokens: int) -> None:
    groups = [full_group(f"g{i}", block_granularity=g) for i, g in enumerate(granularities)]
    model = sc.CapacityModel(scheduler_config(prefix_granularity=2, num_lcm_blocks=8, cache_groups=groups))
    assert model.max_request_tokens == bound_tokens
    assert model.lcm_blocks(bound_tokens) <= 8 < model.lcm_blocks(bound_tokens + 1)


@pytest.mark.behaviour("K1")
def test_blocks_are_folded_into_parents_group_by_group() -> None:
    groups = [full_group("a", cache_blocks_per_lcm_block=3), full_group("b", block_granularity=2)]
    model = sc.CapacityModel(scheduler_config(cache_groups=groups))
    assert [model.blocks(group, 17) for group in (0, 1)] == [5, 9]
    assert model.lcm_blocks(17) == 2 + 9
    demand = {"num_requests": 3, "num_tokens": 40, "context_tokens": 20}
    assert [model.concurrent_blocks(group=group, **demand) for group in (0, 1)] == [10 + 3, 20 + 3]
    assert model.lcm_blocks_for_concurrency(**demand) == 5 + 23


@pytest.mark.behaviour("K6", "K8")
def test_the_worked_demand_of_a_batch() -> None:
    groups = [
        full_group(block_granularity=32, cache_blocks_per_lcm_block=8),
        state_group(block_granularity=32),
        sliding_group(window_tokens=100, block_granularity=32, cache_blocks_per_lcm_block=4),
    ]
    config = scheduler_config(
        prefix_granularity=32, token_budget=1024, cache_groups=groups, verify_width=2, overlap_depth=1
    )
    model = sc.CapacityModel(config)
    demand = {"num_requests": 8, "num_tokens": 20000, "context_tokens": 3000}
    assert [model.concurrent_blocks(group=group, **demand) for group in range(3)] == [625 + 16, 8 * 4, 40 + 4 + 32]
    assert model.lcm_blocks_for_concurrency(**demand) == 81 + 32 + 19 == 132


@pytest.mark.behaviour("K7")
@pytest.mark.parametrize(
    ("role", "num_requests", "num_blocks"),
    [
        (sc.Role.DECODE, 0, 0),
        (sc.Role.DECODE, 1, 33 + 16),
        (sc.Role.DECODE, 3, 3 * 33 + 16),
        (sc.Role.FUSED, 1, 17 + 48),
        (sc.Role.FUSED, 3, 3 * 17 + 48),
    ],
)
def test_few_windows_of_a_decode_node_need_their_landings_and_one_recovery(
    role: sc.Role, num_requests: int, num_blocks: int
) -> None:
    group = sliding_group(window_tokens=513, block_granularity=32)
    model = sc.CapacityModel(scheduler_config(role, prefix_granularity=32, token_budget=1024, cache_groups=[group]))
    demand = {"num_requests": num_requests, "num_tokens": 4000, "context_tokens": 4000}
    assert model.concurrent_blocks(group=0, **demand) == num_blocks


@pytest.mark.behaviour("K10")
def test_sizing_for_one_request_is_never_below_its_bound() -> None:
    mixes = itertools.product(sc.Role, (0, 1), (1, 2, 5), (8, 64, 1024))
    groups = [
        full_group(block_granularity=8),
        state_group(),
        sliding_group("near", window_tokens=7),
        sliding_group("far", window_tokens=100, block_granularity=8),
        sliding_group("last", window_tokens=1, block_granularity=2),
    ]
    for role, overlap_depth, verify_width, token_budget in mixes:
        config = scheduler_config(
            role,
            prefix_granularity=8,
            token_budget=token_budget,
            cache_groups=groups,
            verify_width=verify_width,
            overlap_depth=overlap_depth,
        )
        model = sc.CapacityModel(config)
        for num_tokens in (1, 2, 7, 8, 9, 63, 64, 65, 200, 1023, 5000):
            demand = {"num_requests": 1, "num_tokens": num_tokens, "context_tokens": num_tokens}
            for group in range(len(groups)):
                assert model.concurrent_blocks(group=group, **demand) >= model.blocks(group, num_tokens), config
            assert model.lcm_blocks_for_concurrency(**demand) >= model.lcm_blocks(num_tokens)


@pytest.mark.behaviour("K10")
def test_a_pool_sized_for_one_request_serves_it() -> None:
    """Whatever the bound accepts is computed to its end."""
    mixes = (
        [full_group()],
        [full_group(), sliding_group(window_tokens=9)],
        [full_group(), state_group(block_granularity=2)],
        [full_group(cache_blocks_per_lcm_block=3), sliding_group(window_tokens=3, block_granularity=2)],
    )
    for groups, token_budget, num_tokens in itertools.product(mixes, (4, 6, 64), (2, 7, 17, 40)):
        shape = {"token_budget": token_budget, "cache_groups": groups}
        sizing = sc.CapacityModel(scheduler_config(num_lcm_blocks=0, **shape))  # type: ignore[arg-type]
        num_lcm_blocks = sizing.lcm_blocks_for_concurrency(
            num_requests=1, num_tokens=num_tokens, context_tokens=num_tokens
        )
        scheduler = sc.Scheduler(scheduler_config(num_lcm_blocks=num_lcm_blocks, **shape))  # type: ignore[arg-type]
        assert scheduler.max_request_tokens >= num_tokens
        scheduler.submit([spec("a", num_tokens - 1, max_new_tokens=1)])
        num_computed = 0
        for _ in range(num_tokens):
            plan = scheduler.next_plan()
            num_computed += int(plan.input_lengths.sum())
            wanted = plan.logits_wanted.tolist()
            scheduler.advance([sc.ResultEvent("a", [7] * want) for want in wanted])
        assert num_computed == num_tokens - 1


def test_what_cannot_be_asked_is_refused() -> None:
    model = sc.CapacityModel(scheduler_config())
    for group in (-1, 1):
        with pytest.raises(IndexError, match="no such group"):
            model.blocks(group, 4)
    for number in (-1, 2**41):
        with pytest.raises(ValueError, match="counts and lengths"):
            model.lcm_blocks(number)
