"""Neither the verify width nor the overlap depth shows in what a model says.

A model that is nothing but its cache: what follows a token is a hash of what the row finds in its blocks, so a block
that is missing, stale or somebody else's changes the completion. The same requests must then get the same tokens in
every mode, and each token must have been fed at its position.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler_core as sc

from .builders import full_group, scheduler_config, sliding_group, spec, state_group

GROUP_MIXES = (
    [full_group(block_granularity=2, cache_blocks_per_lcm_block=3)],
    [full_group(), sliding_group(window_tokens=5, block_granularity=2)],
    [full_group(), state_group(block_granularity=2)],
    [sliding_group(window_tokens=3, block_granularity=1), state_group(block_granularity=4)],
)
NUM_TOKEN_IDS = 50

Cell: TypeAlias = tuple[int, int]  # position and token of a row, or length and hash of a state
Fed: TypeAlias = dict[tuple[str, int], int]  # by request and position: the token whose row was kept


def hash_of(*numbers: int) -> int:
    return zlib.crc32(repr(numbers).encode())


@dataclass(slots=True)
class Model:
    """Runs the rows of a plan at once and tells their results later."""

    groups: list[sc.CacheGroupConfig]
    limits: dict[str, int]
    chance: random.Random
    arena: dict[tuple[int, int, int], Cell] = field(default_factory=dict)  # by group, block and offset
    tokens: dict[str, list[int]] = field(default_factory=dict)
    fed: Fed = field(default_factory=dict)
    states: dict[int, Cell] = field(default_factory=dict)  # of the row that runs, by group

    def run(self, plan: sc.Plan) -> list[sc.Event]:
        for group, zeroed in enumerate(plan.zero_blocks):
            for block_id in zeroed.tolist():
                for offset in range(self.groups[group].block_granularity):
                    self.arena[group, block_id, offset] = (-1, 0)
        events: list[sc.Event] = []
        for row, request_id in enumerate(plan.request_ids):
            tables = [table[row].tolist() for table in plan.block_tables]
            self.states.clear()
            if row < plan.num_prefill_rows:
                new_tokens = self.prefill(plan, row, tables)
            else:
                new_tokens = self.verify(request_id, tables, int(plan.input_lengths[row]))
            events.append(sc.ResultEvent(request_id, new_tokens))
            if new_tokens and len(self.tokens[request_id]) == self.limits[request_id]:
                events.append(sc.FinishEvent(request_id))
        return events

    def prefill(self, plan: sc.Plan, row: int, tables: list[list[int]]) -> list[int]:
        request_id, begin = plan.request_ids[row], int(plan.begins[row])
        first = int(plan.input_lengths[:row].sum())
        following = 0
        for number, token in enumerate(plan.token_ids[first : first + int(plan.input_lengths[row])].tolist()):
            following = self.feed(request_id, tables, begin + number, token)
            if begin + number + 1 == int(plan.checkpoint_tokens[row]):
                self.keep_states(tables, begin + number + 1)
        self.keep_states(tables, begin + int(plan.input_lengths[row]))
        new_tokens = [following] * int(plan.logits_wanted[row])
        self.tokens[request_id] += new_tokens
        return new_tokens

    def verify(self, request_id: str, tables: list[list[int]], num_inputs: int) -> list[int]:
        """Drafts are right by chance. Those behind the first wrong one leave rows that must not be seen."""
        tokens = self.tokens[request_id]
        begin = len(tokens) - 1
        num_right = min(self.chance.randint(1, num_inputs), self.limits[request_id] - len(tokens))
        for number in range(num_right):
            tokens.append(self.feed(request_id, tables, begin + number, tokens[-1]))
        if num_right > 0:
            self.keep_states(tables, begin + num_right)
        for position in range(begin + num_right, begin + num_inputs):
            self.write_rows(tables, position, -7)
        return tokens[begin + 1 :]

    def feed(self, request_id: str, tables: list[list[int]], position: int, token: int) -> int:
        self.fed[request_id, position] = token
        self.write_rows(tables, position, token)
        seen = []
        for group, table in enumerate(tables):
            if self.groups[group].family == sc.Family.STATE:
                if group not in self.states:
                    place = self.place(group, table, position - 1, is_state=True) if position else None
                    self.states[group] = self.arena[place] if place else (0, 0)
                self.states[group] = (position + 1, hash_of(*self.states[group], token))
                seen.append(self.states[group][1])
                continue
            window = self.groups[group].sliding_window_tokens or position + 1
            for visible in range(max(0, position - window + 1), position + 1):
                seen += self.arena[self.place(group, table, visible)]
        return hash_of(*seen) % NUM_TOKEN_IDS

    def keep_states(self, tables: list[list[int]], num_tokens: int) -> None:
        for group, table in enumerate(tables):
            if self.groups[group].family == sc.Family.STATE:
                self.arena[self.place(group, table, num_tokens - 1, is_state=True)] = self.states[group]

    def write_rows(self, tables: list[list[int]], position: int, token: int) -> None:
        for group, table in enumerate(tables):
            if self.groups[group].family == sc.Family.HISTORY:
                self.arena[self.place(group, table, position)] = (position, token)

    def place(self, group: int, table: list[int], position: int, *, is_state: bool = False) -> tuple[int, int, int]:
        slot, offset = divmod(position, self.groups[group].block_granularity)
        assert table[slot] > 0
        return group, table[slot], 0 if is_state else offset


def completions(
    role: sc.Role, groups: list[sc.CacheGroupConfig], seed: int, verify_width: int, overlap_depth: int
) -> tuple[dict[str, list[int]], Fed, int]:
    """Plays requests that share prefixes, and continue each other, to their ends."""
    chance = random.Random(seed)
    scheduler = sc.Scheduler(
        scheduler_config(
            role,
            num_lcm_blocks=60,
            max_batch_size=3,
            token_budget=9,
            cache_groups=groups,
            verify_width=verify_width,
            overlap_depth=overlap_depth,
        )
    )
    model = Model(groups, limits={}, chance=random.Random(seed + verify_width))
    landing: list[list[sc.Event]] = []
    num_hit_tokens = 0
    heads: list[list[int]] = [[]]  # what a later prompt may begin with: the same in every mode
    for number in range(8):
        request_id = f"r{number}"
        head = chance.choice(heads)
        prompt = [*head, *(chance.randrange(NUM_TOKEN_IDS) for _ in range(chance.randint(1, 9)))]
        num_new_tokens = chance.randint(1, 9)
        heads.append(prompt)
        model.tokens[request_id] = list(prompt)
        model.limits[request_id] = len(prompt) + num_new_tokens
        is_local = role == sc.Role.DECODE
        scheduler.submit([spec(request_id, prompt, max_new_tokens=num_new_tokens, local_prefill=is_local)])
        waits_for_it = chance.random() < 0.6
        while waits_for_it or number == 7:
            plan = scheduler.next_plan()
            num_hit_tokens += sum(admission.device_hit_tokens for admission in plan.admissions)
            landing.append(model.run(plan))
            if len(landing) > overlap_depth:
                scheduler.advance(landing.pop(0))
            if not scheduler.capacity().num_live_requests:
                heads += model.tokens.values()
                break
    return model.tokens, model.fed, num_hit_tokens


@pytest.mark.behaviour("J12")
@settings(max_examples=40)
@given(
    role=st.sampled_from([sc.Role.FUSED, sc.Role.DECODE]),
    groups=st.sampled_from(GROUP_MIXES),
    seed=st.integers(0, 2**32),
)
def test_a_completion_depends_on_neither_width_nor_overlap(
    role: sc.Role, groups: list[sc.CacheGroupConfig], seed: int
) -> None:
    expected, _, _ = completions(role, groups, seed, verify_width=1, overlap_depth=0)
    for verify_width, overlap_depth in ((1, 0), (1, 1), (4, 0), (4, 1)):
        tokens, fed, _ = completions(role, groups, seed, verify_width, overlap_depth)
        assert tokens == expected
        assert all(tokens[request_id][position] == token for (request_id, position), token in fed.items())


@pytest.mark.parametrize("groups", GROUP_MIXES, ids=lambda groups: "+".join(group.group_id for group in groups))
def test_those_requests_reuse_prefixes(groups: list[sc.CacheGroupConfig]) -> None:
    assert sum(completions(sc.Role.FUSED, groups, seed, 4, 1)[2] for seed in range(10)) > 50
