"""Which snapshots the rows of a forward continue from and leave behind: the plan's slots, resolved and fail-closed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from cache_runtime.contract import CacheGroupContract, CacheRuntimeContract
from cache_runtime.errors import BatchContractError, UnknownGroupError
from cache_runtime.mapping.batch_metadata import CacheBatchMetadata, Int32Array
from cache_runtime.mapping.router import CacheGroupRouter, StateBlocks
from cache_runtime.recipes.spec import CacheFamily, CacheGroupSpec, CacheRetention

GRAIN = 8
NUM_BLOCKS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """The plan of a model with nothing but states."""

    begins: Int32Array
    input_lengths: Int32Array
    block_tables: list[Int32Array]
    checkpoint_tokens: Int32Array
    state_input_slots: list[Int32Array]
    state_output_slots: list[Int32Array]

    @property
    def num_rows(self) -> int:
        return len(self.begins)


def array(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def make_contract() -> CacheRuntimeContract:
    spec = CacheGroupSpec(
        group_id="state",
        family=CacheFamily.STATE,
        retention=CacheRetention.FULL_HISTORY,
        checkpoint_granularity=GRAIN,
    )
    group = CacheGroupContract(
        spec=spec,
        packing=1,
        virtual_packing=1,
        num_blocks=NUM_BLOCKS,
        num_virtual_blocks=NUM_BLOCKS,
        block_stride_rows=None,
    )
    return CacheRuntimeContract(prefix_granularity=GRAIN, num_lcm_blocks=NUM_BLOCKS - 1, groups=(group,))


PLAN = StatePlan(
    begins=array([0, 16, 11]),
    input_lengths=array([5, 21, 1]),
    block_tables=[np.array([[7, -1, -1, -1, -1], [0, 3, 0, 9, 4], [0, 12, -1, -1, -1]], dtype=np.int32)],
    checkpoint_tokens=array([0, 32, 0]),
    state_input_slots=[array([-1, 1, 1])],
    state_output_slots=[array([0, 4, 1])],
)
"""A prompt's beginning, a last chunk with a checkpoint inside, and a decode row that stays in its slot."""


def route(plan: StatePlan) -> StateBlocks:
    contract = make_contract()
    return CacheGroupRouter(contract, {}).route(CacheBatchMetadata.from_plan(plan, contract)).state_blocks("state")


def test_rows_are_given_the_blocks_of_the_slots_that_the_plan_names() -> None:
    blocks = route(PLAN)
    assert blocks.input_blocks.tolist() == [-1, 3, 12]
    assert blocks.output_blocks.tolist() == [7, 4, 12]
    assert blocks.checkpoint_blocks.tolist() == [-1, 9, -1]
    assert blocks.checkpoint_lengths.tolist() == [0, 16, 0]


def test_a_batch_without_rows_has_no_states() -> None:
    empty = array([])
    plan = StatePlan(
        begins=empty,
        input_lengths=empty,
        block_tables=[np.empty((0, 0), dtype=np.int32)],
        checkpoint_tokens=empty,
        state_input_slots=[empty],
        state_output_slots=[empty],
    )
    assert route(plan).output_blocks.tolist() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_input_slots": [array([-1, 2, 1])]}, "row 1 continues from slot 2, which has no block"),
        ({"state_input_slots": [array([-1, 1, 5])]}, "row 2 continues from slot 5, which has no block"),
        ({"state_input_slots": [array([-1, -1, 1])]}, "row 1 begins at 16 and continues from slot -1"),
        ({"state_input_slots": [array([0, 1, 1])]}, "row 0 begins at 0 and continues from slot 0"),
        ({"state_output_slots": [array([1, 4, 1])]}, "row 0 ends in slot 1, which has no block"),
        ({"state_output_slots": [array([0, 4, -1])]}, "row 2 leaves its state nowhere"),
        ({"checkpoint_tokens": array([0, 24, 0])}, "row 1 leaves a checkpoint in slot 2, which has no block"),
        ({"checkpoint_tokens": array([0, 16, 0])}, r"row 1 has its checkpoint at 16, not inside \(16, 37\)"),
        ({"checkpoint_tokens": array([0, 0, 12])}, r"row 2 has its checkpoint at 12, not inside \(11, 12\)"),
        ({"checkpoint_tokens": array([0, 0])}, r"checkpoint_tokens has shape \(2,\), expected \(3,\)"),
        ({"state_input_slots": [array([])]}, r'"state": state_input_slots has shape \(0,\), expected \(3,\)'),
        ({"state_output_slots": []}, "plan carries 0 state_output_slots, the contract has 1 groups"),
    ],
)
def test_a_plan_that_would_lose_or_invent_a_state_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BatchContractError, match=message):
        route(replace(PLAN, **changes))


def test_only_state_groups_have_states() -> None:
    contract = make_contract()
    routed = CacheGroupRouter(contract, {}).route(CacheBatchMetadata.from_plan(PLAN, contract))
    with pytest.raises(UnknownGroupError, match='"full" is no state group'):
        routed.state_blocks("full")
