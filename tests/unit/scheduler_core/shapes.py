"""Random shapes for a scheduler: small pools, which a few prompts fill, over all kinds and mixes of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from hypothesis import strategies as st
from reference_model import Eviction, GroupKind, GroupShape, Role, SchedulerShape
from reference_model.chunking import least_budget
from reference_model.group_policies import policy_of

NUMBERS = st.integers(0, 2**24 - 1)  # drawn evenly up to this size
T = TypeVar("T")


class Digits:
    """Takes a number apart, since drawing many small ones takes the time. 0 is the simplest choice everywhere."""

    def __init__(self, number: int) -> None:
        self.number = number

    def below(self, limit: int) -> int:
        self.number, digit = divmod(self.number, limit)
        return digit

    def of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]


GroupMaker: TypeAlias = Callable[[int, int], GroupShape]  # of the grain and the position in the mix


def full(slots_per_grain: int = 1, packing: int = 1, shards: int = 1) -> GroupMaker:
    return lambda grain, position: GroupShape(
        group_id=f"full{position}",
        block_granularity=max(1, grain // slots_per_grain),
        cache_blocks_per_lcm_block=packing,
        shard_count=shards,
    )


def window(
    window_tokens: int, slots_per_grain: int = 1, packing: int = 1, *, replayable: bool = False, shards: int = 1
) -> GroupMaker:
    return lambda grain, position: GroupShape(
        group_id=f"window{position}",
        kind=GroupKind.SLIDING,
        block_granularity=max(1, grain // slots_per_grain),
        cache_blocks_per_lcm_block=packing,
        window_tokens=window_tokens,
        is_replayable=replayable,
        shard_count=shards,
    )


def state(slots_per_grain: int = 1, packing: int = 1, shards: int = 1) -> GroupMaker:
    return lambda grain, position: GroupShape(
        group_id=f"state{position}",
        kind=GroupKind.STATE,
        block_granularity=max(1, grain // slots_per_grain),
        cache_blocks_per_lcm_block=packing,
        shard_count=shards,
    )


GROUP_MIXES: tuple[tuple[GroupMaker, ...], ...] = (
    (full(),),
    (full(2, 3),),
    (full(), full(4, 5)),
    (full(2, 2), full(4, 3)),
    (full(1, 2), full(2), full(4, 8)),
    (full(2, 4, shards=2), full(4, 6, shards=3)),
    (full(), window(5, 2)),
    (window(3, 4, 4), full(1, 2), window(10)),
    (window(6, 2, 2),),
    (window(1), full(2, 2), window(9, 2, 4, shards=2)),
    (full(), state()),
    (full(2, 2), state(4, 3)),
    (state(2), window(5, 2, 2), full()),
    (state(1, 2), state(2, 4, shards=2)),
    (full(), window(4, 2, replayable=True)),
    (window(3, 4, 2, replayable=True), full(1, 3), window(6, 2), window(5, 1, replayable=True)),
)


def shape_of(role: Role, number: int, other_number: int) -> SchedulerShape:
    """The pool holds one request of some length, and of the groups whose blocks expire up to four. Beside groups that
    need some budget for a chunk there is often not much more."""
    digits, sizes = Digits(number), Digits(other_number)
    prefix_granularity = digits.of((4, 4, 8, 2))
    mix = digits.of(GROUP_MIXES)
    enable_prefix_cache = digits.below(8) != 7
    shape = SchedulerShape(
        role=role,
        prefix_granularity=prefix_granularity,
        num_lcm_blocks=1,
        max_batch_size=5 - digits.below(5),
        token_budget=24 - digits.below(24),
        groups=tuple(make(prefix_granularity, position) for position, make in enumerate(mix)),
        enable_prefix_cache=enable_prefix_cache,
        max_ready_ungranted=4 - digits.below(4),
        verify_width=sizes.of((1, 1, 1, 2, 4)),
        overlap_depth=sizes.below(2),
        eviction=digits.of(list(Eviction)) if enable_prefix_cache else Eviction.LRU,
    )
    host, enable_storage = sizes.below(6), sizes.below(3) > 0
    least = max(least_budget(shape), shape.verify_width)
    is_tight = sizes.below(2) == 1 and least_budget(shape) > 0
    shape = replace(shape, token_budget=least + sizes.below(4) if is_tight else max(shape.token_budget, least))
    capacity_tokens, num_requests = 16 + sizes.below(48), 1 + sizes.below(4)
    num_lcm_blocks = 0
    for group in shape.groups:
        ways = (True, False) if role is Role.DECODE else (True,)
        policy = policy_of(shape, group)
        num_blocks = max(policy.held_at_most(capacity_tokens, capacity_tokens, is_local=way) for way in ways)
        num_times = 1 if group.kind is GroupKind.FULL else num_requests
        num_lcm_blocks += -(-num_times * num_blocks // group.cache_blocks_per_lcm_block)
    num_host_lcm_blocks = (0, num_lcm_blocks, 2 * num_lcm_blocks, 2, num_lcm_blocks, 1 + num_lcm_blocks // 2)[host]
    return replace(
        shape,
        num_lcm_blocks=num_lcm_blocks,
        num_host_lcm_blocks=num_host_lcm_blocks,
        enable_storage=enable_storage and num_host_lcm_blocks > 0,
    )
