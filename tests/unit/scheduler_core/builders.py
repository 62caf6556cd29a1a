"""Small builders for scheduler tests: configurations with every number in sight, and a runtime without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import scheduler_core as sc


def full_group(
    group_id: str = "full",
    *,
    block_granularity: int = 4,
    cache_blocks_per_lcm_block: int = 1,
    shard_count: int = 1,
) -> sc.CacheGroupConfig:
    return sc.CacheGroupConfig(
        group_id=group_id,
        shard_count=shard_count,
        family=sc.Family.HISTORY,
        retention=sc.Retention.FULL_HISTORY,
        block_granularity=block_granularity,
        cache_blocks_per_lcm_block=cache_blocks_per_lcm_block,
    )


def sliding_group(
    group_id: str = "sliding",
    *,
    window_tokens: int,
    block_granularity: int = 4,
    cache_blocks_per_lcm_block: int = 1,
    replayable: bool = False,
) -> sc.CacheGroupConfig:
    return sc.CacheGroupConfig(
        group_id=group_id,
        replayable=replayable,
        family=sc.Family.HISTORY,
        retention=sc.Retention.SLIDING_WINDOW,
        block_granularity=block_granularity,
        cache_blocks_per_lcm_block=cache_blocks_per_lcm_block,
        sliding_window_tokens=window_tokens,
    )


def state_group(
    group_id: str = "state", *, block_granularity: int = 4, cache_blocks_per_lcm_block: int = 1
) -> sc.CacheGroupConfig:
    return sc.CacheGroupConfig(
        group_id=group_id,
        family=sc.Family.STATE,
        retention=sc.Retention.FULL_HISTORY,
        block_granularity=block_granularity,
        cache_blocks_per_lcm_block=cache_blocks_per_lcm_block,
    )


def scheduler_config(
    role: sc.Role = sc.Role.FUSED,
    *,
    prefix_granularity: int = 4,
    num_lcm_blocks: int = 16,
    max_batch_size: int = 8,
    token_budget: int = 64,
    cache_groups: Sequence[sc.CacheGroupConfig] | None = None,
    enable_prefix_cache: bool = True,
    max_ready_ungranted: int = 64,
    verify_width: int = 1,
    overlap_depth: int = 0,
    eviction_policy: sc.EvictionPolicy = sc.EvictionPolicy.LRU,
    enable_prefix_events: bool = False,
    num_host_lcm_blocks: int = 0,
    enable_storage: bool = False,
) -> sc.SchedulerConfig:
    return sc.SchedulerConfig(
        role=role,
        prefix_granularity=prefix_granularity,
        num_lcm_blocks=num_lcm_blocks,
        max_batch_size=max_batch_size,
        token_budget=token_budget,
        cache_groups=[full_group()] if cache_groups is None else list(cache_groups),
        enable_prefix_cache=enable_prefix_cache,
        max_ready_ungranted=max_ready_ungranted,
        verify_width=verify_width,
        overlap_depth=overlap_depth,
        eviction_policy=eviction_policy,
        enable_prefix_events=enable_prefix_events,
        num_host_lcm_blocks=num_host_lcm_blocks,
        enable_storage=enable_storage,
    )


def spec(
    request_id: str, tokens: int | Sequence[int], *, max_new_tokens: int | None = 4, local_prefill: bool = False
) -> sc.RequestSpec:
    """A request; an int stands for that many ascending tokens."""
    ids = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    return sc.RequestSpec(request_id=request_id, tokens=ids, max_new_tokens=max_new_tokens, local_prefill=local_prefill)


@dataclass(slots=True)
class Runtime:
    """Carries plans out without a model: every token is a function of its position."""

    scheduler: sc.Scheduler
    admissions: dict[str, int] = field(default_factory=dict)

    def plan(self) -> sc.Plan:
        plan = self.scheduler.next_plan()
        self.admissions.update({a.request_id: a.device_hit_tokens for a in plan.admissions})
        return plan

    def land(self, plan: sc.Plan, num_tokens: int = 1) -> None:
        """Answers every row of a plan; a decode row with up to `num_tokens`."""
        self.scheduler.advance(
            [
                sc.ResultEvent(request_id, tokens_of(plan, row, num_tokens))
                for row, request_id in enumerate(plan.request_ids)
            ]
        )

    def step(self) -> sc.Plan:
        plan = self.plan()
        self.land(plan)
        return plan

    def run_until_idle(self, max_steps: int = 200) -> None:
        for _ in range(max_steps):
            if self.step().num_rows == 0:
                return
        raise AssertionError("the scheduler did not come to rest")

    def finish(self, *request_ids: str) -> sc.Plan:
        """Ends requests and gives the plan that lists them."""
        self.scheduler.advance([sc.FinishEvent(request_id) for request_id in request_ids])
        return self.plan()


def tokens_of(plan: sc.Plan, row: int, num_tokens: int) -> list[int]:
    """What a row's result brings: 1000 + position."""
    begin, length = int(plan.begins[row]), int(plan.input_lengths[row])
    if row < plan.num_prefill_rows:
        return [1000 + begin + length] * int(plan.logits_wanted[row])
    return [1000 + begin + 1 + number for number in range(min(num_tokens, length))]


def rows_of(plan: sc.Plan) -> list[tuple[str, int, int]]:
    """(request, begin, input length) of every row."""
    return list(zip(plan.request_ids, plan.begins.tolist(), plan.input_lengths.tolist(), strict=True))
