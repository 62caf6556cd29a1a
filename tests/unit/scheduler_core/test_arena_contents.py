"""What the blocks hold: random histories on a simulated arena, whose every read must find what was written for it.

A row of the arena is stood for by the tokens up to its position, a state by the tokens it sums up, so that a read of a
block that was never written, was given to someone else or holds another prefix is seen. Peers copy late, as a data
plane does: a copy out of a prefill node reads the blocks that were posted for it, and a granted block of a failed
handoff may still be written until it is quiet. Every history ends by itself: nothing that was submitted waits for ever.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler_core as sc

from .builders import full_group, scheduler_config, sliding_group, spec, state_group

GROUP_MIXES = (
    [full_group("only", block_granularity=4)],
    [
        full_group("single", block_granularity=4),
        full_group("packed", block_granularity=4, cache_blocks_per_lcm_block=4),
    ],
    [
        full_group("fine", block_granularity=2, cache_blocks_per_lcm_block=8),
        full_group("coarse", block_granularity=4),
    ],
    [full_group(), sliding_group(window_tokens=6, block_granularity=2)],
    [
        sliding_group("near", window_tokens=3, block_granularity=1, cache_blocks_per_lcm_block=4),
        full_group(cache_blocks_per_lcm_block=2),
        sliding_group("far", window_tokens=9, block_granularity=4),
    ],
    [sliding_group("only", window_tokens=5, block_granularity=2, cache_blocks_per_lcm_block=2)],
    [full_group(), state_group(block_granularity=4)],
    [full_group(block_granularity=2), state_group(block_granularity=1, cache_blocks_per_lcm_block=3)],
    [
        state_group(block_granularity=2),
        sliding_group(window_tokens=1),
        full_group(cache_blocks_per_lcm_block=3),
    ],
    [state_group("only", block_granularity=2)],
    [full_group(), sliding_group(window_tokens=3, block_granularity=2, replayable=True)],
    [
        sliding_group("private", window_tokens=4, block_granularity=1, replayable=True),
        full_group(),
        sliding_group("shared", window_tokens=6, block_granularity=2),
    ],
    [
        full_group("sharded", block_granularity=2, cache_blocks_per_lcm_block=4, shard_count=2),
        sliding_group(window_tokens=5),
    ],
)

LONGEST_PROMPT_TOKENS = 60

Row = tuple[int, ...]  # all tokens up to and including the row's


@dataclass(slots=True)
class Copy:
    """A posted read of a peer: blocks of one group, and what they held when it was posted."""

    group: int
    block_ids: list[int]
    rows: list[list[Row]]


@dataclass(slots=True)
class Peer:
    """The other side of one handoff."""

    grant: sc.RemotePrefill | None = None
    num_posted_blocks: list[int] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    is_over: bool = False


@dataclass(slots=True)
class Node:
    """A scheduler, the arena it gives out and the peers that touch it."""

    role: sc.Role
    groups: list[sc.CacheGroupConfig]
    chance: random.Random
    scheduler: sc.Scheduler = field(init=False)
    arena: dict[tuple[int, int], list[Row]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)  # prompt, completion
    peers: dict[str, Peer] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    prompts: list[list[int]] = field(default_factory=list)
    num_submitted: int = 0
    num_hit_tokens: int = 0

    def __post_init__(self) -> None:
        self.scheduler = sc.Scheduler(
            scheduler_config(
                self.role,
                num_lcm_blocks=self.chance.randint(8, 16) + 5 * (len(self.groups) - 1),
                max_batch_size=3,
                token_budget=self.chance.choice((8, 9, 64) if any(g.replayable for g in self.groups) else (5, 9, 64)),
                cache_groups=self.groups,
                max_ready_ungranted=3,
                eviction_policy=self.chance.choice(list(sc.EvictionPolicy)),
            )
        )

    def submit(self) -> None:
        """A prompt, often one that continues an earlier one."""
        request_id = f"r{self.num_submitted}"
        self.num_submitted += 1
        head = self.chance.choice(self.prompts) if self.prompts and self.chance.random() < 0.7 else []
        tail = [self.chance.randrange(3) for _ in range(self.chance.choice((1, 2, 4, 8, 30)))]
        longest = min(LONGEST_PROMPT_TOKENS, self.scheduler.max_request_tokens - 1)
        prompt = [*head, *tail][:longest]
        max_new_tokens = self.chance.randint(0, min(5, self.scheduler.max_request_tokens - len(prompt)))
        is_remote = self.role == sc.Role.DECODE and self.chance.random() < 0.7
        is_local = self.role == sc.Role.DECODE and not is_remote
        self.scheduler.submit([spec(request_id, prompt, max_new_tokens=max_new_tokens, local_prefill=is_local)])
        self.prompts.append(prompt)
        self.tokens[request_id] = list(prompt)
        self.limits[request_id] = (len(prompt), max(1, max_new_tokens))
        if is_remote:
            self.scheduler.advance([sc.ReadyEvent(request_id)])

    def step(self) -> bool:
        """One plan and its results; False when there was nothing to do."""
        plan = self.scheduler.next_plan()
        self.num_hit_tokens += sum(admission.device_hit_tokens for admission in plan.admissions)
        for request_id in plan.finished:
            assert request_id in self.ended
            self.peers.pop(request_id, None)
            del self.tokens[request_id], self.limits[request_id]
        self._zero(plan)
        for grant in plan.remote_prefills:
            self.peers[grant.request_id] = Peer(grant=grant)
        for handover in plan.handovers:
            self.peers[handover.request_id].is_over = True
        self._compute(plan)
        return not plan.is_empty

    def _zero(self, plan: sc.Plan) -> None:
        for group, block_ids in enumerate(plan.zero_blocks):
            for block_id in block_ids.tolist():
                self.arena[group, block_id] = [()] * self.groups[group].block_granularity

    def _compute(self, plan: sc.Plan) -> None:
        for row, request_id in enumerate(plan.request_ids):
            begin, length = int(plan.begins[row]), int(plan.input_lengths[row])
            for group, table in enumerate(plan.block_tables):
                if self.groups[group].family == sc.Family.STATE:
                    self._compute_state(plan, row, group)
                    continue
                first_new = begin + int(plan.replay_lengths[row])
                for position in range(begin if self.groups[group].replayable else first_new, begin + length):
                    self._write(group, table[row].tolist(), position, request_id)
                self.check_rows(group, table[row].tolist(), request_id, first_new, begin + length)
            if self.role == sc.Role.PREFILL:
                self._post(request_id, begin + length)
        events: list[sc.Event] = []
        for request_id, wanted in zip(plan.request_ids, plan.logits_wanted.tolist(), strict=True):
            new_tokens = [self.chance.randrange(3)] * wanted
            self.tokens[request_id] += new_tokens
            events.append(sc.ResultEvent(request_id, new_tokens))
            prompt, completion = self.limits[request_id]
            if self.role != sc.Role.PREFILL and len(self.tokens[request_id]) == prompt + completion:
                events.append(sc.FinishEvent(request_id))
                self.ended.add(request_id)
        self.scheduler.advance(events)

    def _compute_state(self, plan: sc.Plan, row: int, group: int) -> None:
        request_id, table = plan.request_ids[row], plan.block_tables[group][row].tolist()
        begin, end = int(plan.begins[row]), int(plan.begins[row] + plan.input_lengths[row])
        input_slot = int(plan.state_input_slots[group][row])
        assert (input_slot < 0) == (begin == 0)
        if begin:
            self.check_state(group, table[input_slot], request_id, begin)
        checkpoint = int(plan.checkpoint_tokens[row])
        if checkpoint:
            assert begin < checkpoint < end
            self.write_state(
                group, table[(checkpoint - 1) // self.groups[group].block_granularity], request_id, checkpoint
            )
        self.write_state(group, table[int(plan.state_output_slots[group][row])], request_id, end)

    def write_state(self, group: int, block_id: int, request_id: str, num_tokens: int) -> None:
        assert block_id > 0
        self.arena[group, block_id] = [tuple(self.tokens[request_id][:num_tokens])]

    def check_state(self, group: int, block_id: int, request_id: str, num_tokens: int) -> None:
        assert self.arena[group, block_id] == [tuple(self.tokens[request_id][:num_tokens])], (request_id, group)

    def _write(self, group: int, table: Sequence[int], position: int, request_id: str) -> None:
        slot, offset = divmod(position, self.groups[group].block_granularity)
        self.arena[group, table[slot]][offset] = tuple(self.tokens[request_id][: position + 1])

    def check_rows(self, group: int, table: Sequence[int], request_id: str, begin: int, num_tokens: int) -> None:
        """Everything that queries from `begin` on can see."""
        granularity = self.groups[group].block_granularity
        window = self.groups[group].sliding_window_tokens or num_tokens + begin + 1
        for position in range(max(0, begin - window + 1), num_tokens):
            slot, offset = divmod(position, granularity)
            found = self.arena[group, table[slot]][offset]
            assert found == tuple(self.tokens[request_id][: position + 1]), (request_id, group, position)

    def _post(self, request_id: str, num_computed: int) -> None:
        """Posts the blocks that a chunk completed, read from the table as it is now."""
        peer = self.peers.setdefault(request_id, Peer(num_posted_blocks=[0] * len(self.groups)))
        is_whole = num_computed == self.limits[request_id][0]
        for group, table in enumerate(self.scheduler.block_tables(request_id)):
            first, end = self._slots_to_send(group, request_id, num_computed, is_whole)
            first = max(first, peer.num_posted_blocks[group])
            block_ids = table[first:end].tolist()
            assert 0 not in block_ids
            rows = [list(self.arena[group, block_id]) for block_id in block_ids]
            peer.copies.append(Copy(group, block_ids, rows))
            peer.num_posted_blocks[group] = max(first, end)

    def _slots_to_send(self, group: int, request_id: str, num_computed: int, is_whole: bool) -> tuple[int, int]:
        """Completed blocks that the peer's first step can see; a state only once it is final."""
        granularity = self.groups[group].block_granularity
        num_prompt = self.limits[request_id][0]
        last = (num_prompt - 1) // granularity
        if self.groups[group].family == sc.Family.STATE:
            return last, last + 1 if is_whole else last
        window = self.groups[group].sliding_window_tokens or num_prompt + 1
        return max(0, num_prompt - window + 1) // granularity, last + 1 if is_whole else num_computed // granularity

    def move_bytes(self) -> None:
        """One peer copies what was posted for it, or writes what it was granted."""
        if not self.peers:
            return
        request_id = self.chance.choice(sorted(self.peers))
        peer = self.peers[request_id]
        if peer.grant is not None:
            self._receive(request_id, peer, peer.grant)
            return
        for copy in peer.copies:
            assert [self.arena[copy.group, block_id] for block_id in copy.block_ids] == copy.rows, request_id
        peer.copies.clear()
        if request_id in self.ended:
            self.scheduler.advance([sc.QuiescedEvent(request_id)])
            del self.peers[request_id]
        elif peer.is_over:
            self.scheduler.advance([sc.HandedOverEvent(request_id)])
            self.ended.add(request_id)
            del self.peers[request_id]

    def _receive(self, request_id: str, peer: Peer, grant: sc.RemotePrefill) -> None:
        num_tokens = self.limits[request_id][0]
        for group, (first_slot, block_ids) in enumerate(zip(grant.first_slots, grant.block_ids, strict=True)):
            granularity = self.groups[group].block_granularity
            table = [0] * first_slot + block_ids.tolist()
            if self.groups[group].family == sc.Family.STATE:
                assert len(block_ids) == 1
                self.write_state(group, table[-1], request_id, num_tokens)
                continue
            for position in range(first_slot * granularity, num_tokens):
                self._write(group, table, position, request_id)
        del self.peers[request_id]
        if request_id in self.ended:
            self.scheduler.advance([sc.QuiescedEvent(request_id)])
            return
        for group, held in enumerate(self.scheduler.block_tables(request_id)):
            if self.groups[group].family == sc.Family.STATE:
                slot = (num_tokens - 1) // self.groups[group].block_granularity
                self.check_state(group, held.tolist()[slot], request_id, num_tokens)
            else:
                self.check_rows(group, held.tolist(), request_id, num_tokens, num_tokens)
        self.scheduler.advance([sc.DoneEvent(request_id, 1)])
        self.tokens[request_id].append(1)
        if self.limits[request_id][1] == 1:
            self.scheduler.advance([sc.FinishEvent(request_id)])
            self.ended.add(request_id)

    def grant(self) -> None:
        if self.role == sc.Role.PREFILL and self.peers:
            self.scheduler.advance([sc.GrantedEvent(self.chance.choice(sorted(self.peers)))])

    def end_one(self) -> None:
        alive = sorted(self.tokens.keys() - self.ended)
        if alive and self.chance.random() < 0.4:
            request_id = self.chance.choice(alive)
            self.scheduler.advance([sc.AbortEvent(request_id)])
            self.ended.add(request_id)

    def run_to_the_end(self) -> None:
        for _ in range(3000):
            if not self.tokens:
                break
            for request_id in sorted(self.peers) if self.role == sc.Role.PREFILL else []:
                self.scheduler.advance([sc.GrantedEvent(request_id)])
            self.step()
            self.move_bytes()
        assert not self.tokens, f"these wait for ever:\n{self.scheduler.describe()}"
        assert self.scheduler.clear_cache()
        gauges = self.scheduler.capacity()
        assert gauges.empty_lcm_blocks == gauges.total_lcm_blocks


MOVES = (Node.submit, Node.submit, Node.step, Node.step, Node.step, Node.move_bytes, Node.grant, Node.end_one)


def play(role: sc.Role, groups: list[sc.CacheGroupConfig], seed: int, num_moves: int) -> Node:
    node = Node(role=role, groups=groups, chance=random.Random(seed))
    for _ in range(num_moves):
        node.chance.choice(MOVES)(node)
    node.run_to_the_end()
    return node


@settings(max_examples=60, deadline=None)
@given(
    role=st.sampled_from([sc.Role.FUSED, sc.Role.PREFILL, sc.Role.DECODE]),
    groups=st.sampled_from(GROUP_MIXES),
    seed=st.integers(0, 2**32),
    num_moves=st.integers(1, 150),
)
def test_every_read_finds_what_was_written_for_it(
    role: sc.Role, groups: list[sc.CacheGroupConfig], seed: int, num_moves: int
) -> None:
    play(role, groups, seed, num_moves)


@pytest.mark.parametrize("role", [sc.Role.FUSED, sc.Role.PREFILL, sc.Role.DECODE])
@pytest.mark.parametrize("groups", GROUP_MIXES, ids=lambda groups: "+".join(group.group_id for group in groups))
def test_the_histories_reuse_prefixes(role: sc.Role, groups: list[sc.CacheGroupConfig]) -> None:
    assert sum(play(role, groups, seed, 100).num_hit_tokens for seed in range(10)) > 100
