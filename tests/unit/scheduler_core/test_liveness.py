"""Every request ends, with the tokens it would have had alone, in pools that are far too small for all of them.

The runtime here has a memory: rows are written into blocks and read back through the tables of the plan, and each token
is a digest of everything before it. So a block given away too early, a prompt that lost a token or one that was
generated twice is seen. Requests declare much more than they generate, or nothing.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler_core as sc

from .builders import full_group, scheduler_config, sliding_group, spec, state_group

GROUP_MIXES = (
    [full_group("only", block_granularity=4)],
    [full_group("fine", block_granularity=1, cache_blocks_per_lcm_block=3)],
    [full_group("single"), full_group("packed", block_granularity=2, cache_blocks_per_lcm_block=4)],
    [full_group(), sliding_group(window_tokens=5, block_granularity=2, cache_blocks_per_lcm_block=2)],
    [full_group(block_granularity=2), state_group(block_granularity=4)],
    [full_group(), sliding_group(window_tokens=3, block_granularity=2, replayable=True)],
)


def next_token(history: Sequence[int]) -> int:
    return int.from_bytes(hashlib.sha256(repr(list(history)).encode()).digest()[:2], "little")


def generated_alone(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens


@dataclass(slots=True)
class Wanted:
    prompt: list[int]
    num_generated: int


@dataclass(slots=True)
class Node:
    role: sc.Role
    groups: list[sc.CacheGroupConfig]
    num_lcm_blocks: int
    chance: random.Random
    scheduler: sc.Scheduler = field(init=False)
    arena: dict[tuple[int, int], list[int | None]] = field(default_factory=dict)
    wanted: dict[str, Wanted] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    landing: list[sc.RemotePrefill] = field(default_factory=list)
    answers: list[sc.Event] = field(default_factory=list)
    num_retracted: int = 0

    def __post_init__(self) -> None:
        self.scheduler = sc.Scheduler(
            scheduler_config(
                self.role,
                num_lcm_blocks=self.num_lcm_blocks,
                max_batch_size=4,
                token_budget=12,
                cache_groups=self.groups,
                enable_prefix_cache=self.chance.random() < 0.8,
            )
        )

    def submit(self, number: int) -> None:
        name, limit_tokens = f"r{number}", self.scheduler.max_request_tokens
        stem = self.chance.choice((0, 0, 7))
        num_prompt = self.chance.randint(1, max(1, limit_tokens // 2))
        prompt = [stem + at for at in range(num_prompt)]
        num_generated = self.chance.randint(1, max(1, min(40, limit_tokens - num_prompt)))
        declared = self.chance.choice((None, None, num_generated, limit_tokens - num_prompt))
        is_local = self.role == sc.Role.DECODE and self.chance.random() < 0.3
        self.scheduler.submit([spec(name, prompt, max_new_tokens=declared, local_prefill=is_local)])
        self.wanted[name], self.tokens[name] = Wanted(prompt, num_generated), list(prompt)
        if self.role == sc.Role.DECODE and not is_local:
            self.scheduler.advance([sc.ReadyEvent(name)])

    def step(self) -> None:
        plan = self.scheduler.next_plan()
        self.num_retracted += len(plan.retracted)
        for request_id in plan.finished:
            del self.wanted[request_id], self.tokens[request_id]
        assert not set(plan.retracted) & set(plan.request_ids)
        for group, zeroed in enumerate(plan.zero_blocks):
            ids = zeroed.tolist()
            assert len(set(ids)) == len(ids)
            self.arena.update({(group, block_id): [None] * self.groups[group].block_granularity for block_id in ids})
        self.landing += plan.remote_prefills
        offset = 0
        for row, request_id in enumerate(plan.request_ids):
            length = int(plan.input_lengths[row])
            self.compute(plan, row, plan.token_ids[offset : offset + length].tolist())
            offset += length
            if plan.logits_wanted[row]:
                self.generate(request_id)
            else:
                self.answers.append(sc.ResultEvent(request_id, []))

    def compute(self, plan: sc.Plan, row: int, inputs: list[int]) -> None:
        """Reads back all that a full group holds. The other kinds are watched by test_arena_contents.py."""
        begin, history = int(plan.begins[row]), self.tokens[plan.request_ids[row]]
        for group, table in enumerate(plan.block_tables):
            if self.groups[group].retention == sc.Retention.FULL_HISTORY and self.is_history(group):
                first_new = int(plan.replay_lengths[row])
                for at in range(first_new, len(inputs)):
                    self.write(group, table[row].tolist(), begin + at, inputs[at])
                end = begin + len(inputs)
                assert [self.read(group, table[row].tolist(), at) for at in range(end)] == history[:end]

    def is_history(self, group: int) -> bool:
        return self.groups[group].family == sc.Family.HISTORY

    def write(self, group: int, table: list[int], position: int, token: int) -> None:
        slot, offset = divmod(position, self.groups[group].block_granularity)
        self.arena[group, table[slot]][offset] = token

    def read(self, group: int, table: list[int], position: int) -> int | None:
        slot, offset = divmod(position, self.groups[group].block_granularity)
        return self.arena[group, table[slot]][offset]

    def generate(self, request_id: str) -> None:
        history = self.tokens[request_id]
        history.append(next_token(history))
        self.answers.append(sc.ResultEvent(request_id, history[-1:]))
        self.end_if_complete(request_id)

    def end_if_complete(self, request_id: str) -> None:
        wanted, history = self.wanted[request_id], self.tokens[request_id]
        if len(history) == len(wanted.prompt) + wanted.num_generated:
            assert history == generated_alone(wanted.prompt, wanted.num_generated)
            self.answers.append(sc.FinishEvent(request_id))

    def land(self) -> None:
        """Results land together, remote prompts at random."""
        for grant in self.landing if self.chance.random() < 0.5 else []:
            request_id = grant.request_id
            for group, (first_slot, ids) in enumerate(zip(grant.first_slots, grant.block_ids, strict=True)):
                if self.groups[group].retention == sc.Retention.FULL_HISTORY and self.is_history(group):
                    table = [0] * first_slot + ids.tolist()
                    history = self.tokens[request_id]
                    for at in range(first_slot * self.groups[group].block_granularity, len(history)):
                        self.write(group, table, at, history[at])
            self.tokens[request_id].append(next_token(self.tokens[request_id]))
            self.answers.append(sc.DoneEvent(request_id, self.tokens[request_id][-1]))
            self.end_if_complete(request_id)
            self.landing = [other for other in self.landing if other is not grant]
        self.scheduler.advance(self.answers)
        self.answers = []


def live_through(
    role: sc.Role, groups: list[sc.CacheGroupConfig], num_lcm_blocks: int, num_requests: int, seed: int
) -> Node:
    node = Node(role, groups, num_lcm_blocks, random.Random(seed))
    num_submitted = 0
    for _ in range(20_000):
        if num_submitted < num_requests and node.chance.random() < 0.4:
            node.submit(num_submitted)
            num_submitted += 1
        node.step()
        if node.chance.random() < 0.8:
            node.land()
        if num_submitted == num_requests and not node.wanted:
            break
    assert not node.wanted, f"these wait for ever:\n{node.scheduler.describe()}"
    gauges = node.scheduler.capacity()
    assert gauges.empty_lcm_blocks + gauges.cached_lcm_blocks == gauges.total_lcm_blocks
    assert node.scheduler.clear_cache()
    assert node.scheduler.capacity().empty_lcm_blocks == gauges.total_lcm_blocks
    return node


@settings(max_examples=80)
@given(
    role=st.sampled_from([sc.Role.FUSED, sc.Role.DECODE]),
    groups=st.sampled_from(GROUP_MIXES),
    num_lcm_blocks=st.integers(14, 24),
    num_requests=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_every_request_ends_with_the_tokens_it_would_have_had_alone(
    role: sc.Role, groups: list[sc.CacheGroupConfig], num_lcm_blocks: int, num_requests: int, seed: int
) -> None:
    live_through(role, groups, num_lcm_blocks, num_requests, seed)


def test_the_pools_are_small_enough_that_requests_give_way() -> None:
    for role in (sc.Role.FUSED, sc.Role.DECODE):
        for groups in GROUP_MIXES:
            assert sum(live_through(role, groups, 14, 10, seed).num_retracted for seed in range(4)) > 10
