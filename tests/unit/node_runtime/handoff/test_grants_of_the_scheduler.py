"""What a decode node's scheduler grants is what a prefill node takes, for every kind of group, length and hit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.handoff_values import grant
from unit.scheduler_core.builders import full_group, scheduler_config, sliding_group, spec, state_group

import scheduler_core as sc
from cache_runtime.recipes.spec import CacheFamily, CacheRetention
from cache_runtime.transfer.schema import GroupSchema
from node_runtime.handoff.checks import GrantedGroup, check_grant
from node_runtime.handoff.messages import GroupGrant

GRAIN = 4
NUM_LCM_BLOCKS = 400

Groups = list[sc.CacheGroupConfig]


@st.composite
def groups(draw: st.DrawFn) -> Groups:
    """A full group and others beside it, in any geometry that divides the grain."""
    granularity = st.sampled_from([1, 2, 4])
    chosen = [full_group(block_granularity=draw(granularity))]
    if draw(st.booleans()):
        chosen.append(sliding_group(window_tokens=draw(st.integers(1, 20)), block_granularity=draw(granularity)))
    match draw(st.sampled_from(["state", "replayed", None])):
        case "state":
            chosen.append(state_group(block_granularity=draw(granularity)))
        case "replayed":
            window_tokens, block_granularity = draw(st.integers(1, 20)), draw(granularity)
            chosen.append(
                sliding_group(
                    "replayed", window_tokens=window_tokens, block_granularity=block_granularity, replayable=True
                )
            )
    return chosen


def schema_of(group: sc.CacheGroupConfig) -> GroupSchema:
    """As a prefill node learns of the group from its peer's manifest."""
    return GroupSchema(
        group_id=group.group_id,
        family=CacheFamily(group.family.name.lower()),
        retention=CacheRetention(group.retention.name.lower()),
        block_granularity=group.block_granularity,
        sliding_window_tokens=group.sliding_window_tokens,
        replayable=group.replayable,
    )


class DecodeSide:
    """A decode scheduler whose every grant is put before the prefill node's check."""

    def __init__(self, chosen: Groups) -> None:
        self._group_ids = [group.group_id for group in chosen]
        self._limits = {
            group.group_id: GrantedGroup.of(schema_of(group), NUM_LCM_BLOCKS * group.cache_blocks_per_lcm_block + 1)
            for group in chosen
        }
        self._scheduler = sc.Scheduler(
            scheduler_config(
                sc.Role.DECODE, prefix_granularity=GRAIN, num_lcm_blocks=NUM_LCM_BLOCKS, cache_groups=chosen
            )
        )

    def run(self, request_id: str, tokens: list[int]) -> int:
        """Hit tokens of a request that is granted, checked, filled and finished."""
        self._scheduler.submit([spec(request_id, tokens, max_new_tokens=4)])
        self._scheduler.advance([sc.ReadyEvent(request_id)])
        (remote,) = self._scheduler.next_plan().remote_prefills
        granted = tuple(
            GroupGrant(group_id=group_id, first_slot=int(first_slot), block_ids=tuple(map(int, block_ids)))
            for group_id, first_slot, block_ids in zip(
                self._group_ids, remote.first_slots, remote.block_ids, strict=True
            )
        )
        check_grant(
            grant(from_token=remote.from_token, groups=granted),
            num_prompt_tokens=len(tokens),
            prefix_granularity=GRAIN,
            groups=self._limits,
        )
        self._scheduler.advance([sc.DoneEvent(request_id, 7), sc.FinishEvent(request_id)])
        self._scheduler.next_plan()
        return int(remote.from_token)


@settings(max_examples=80)
@given(
    chosen=groups(),
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=4),
    num_shared=st.integers(0, 40),
)
def test_every_grant_of_the_scheduler_passes_the_check(chosen: Groups, lengths: list[int], num_shared: int) -> None:
    side = DecodeSide(chosen)
    for index, length in enumerate(lengths):
        shared = [1] * min(num_shared, length)
        side.run(str(index), [*shared, *([100 + index] * (length - len(shared)))])


def test_hits_are_among_the_grants_that_are_checked() -> None:
    side = DecodeSide([full_group(), sliding_group(window_tokens=5)])
    assert side.run("first", [1] * 30) == 0
    assert side.run("second", [1] * 30) == 28
