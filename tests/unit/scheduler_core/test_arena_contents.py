"""What the blocks hold: random histories on a simulated arena, whose every read must find what was written for it.

A row of the arena is stood for by the tokens up to its position, a state by the tokens it sums up, so that a read of a
block that was never written, was given to someone else or holds another prefix is seen. Peers copy late, as a data
plane does: a copy out of a prefill node reads the blocks that were posted for it, and a granted block of a failed
handoff may still be written until it is quiet. Decode rows verify drafts, of which a random number is right, and plans
may be made before the last results have landed: then the device knows tokens that the scheduler does not. Every history
ends by itself: nothing that was submitted waits for ever.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler_core as sc

from .builders import full_group, sliding_group, spec, state_group
from .random_settings import Setting, settings_with
from .tier_runtime import HostMemory

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
WRONG_DRAFT = -9

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

    setting: Setting
    chance: random.Random
    scheduler: sc.Scheduler = field(init=False)
    memory: HostMemory[list[Row]] = field(init=False)
    arena: dict[tuple[int, int], list[Row]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)  # as the device knows them
    landing: list[list[sc.Event]] = field(default_factory=list)  # by plan: what the scheduler has not heard yet
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)  # prompt, completion
    peers: dict[str, Peer] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    prompts: list[list[int]] = field(default_factory=list)
    num_submitted: int = 0
    num_hit_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_storage_hit_tokens: int = 0
    num_retracted: int = 0

    def __post_init__(self) -> None:
        self.scheduler = self.setting.make_scheduler(
            self.chance,
            num_lcm_blocks=self.chance.randint(8, 16) + 5 * (len(self.setting.groups) - 1) + self.setting.verify_width,
            token_budget=self.chance.choice(
                (8, 9, 64) if any(g.replayable for g in self.setting.groups) else (5, 9, 64)
            ),
        )
        self.memory = HostMemory(self.scheduler, self.arena, self.chance, list, self.setting.has_storage)

    def submit(self) -> None:
        """A prompt, often one that continues an earlier one."""
        request_id = f"r{self.num_submitted}"
        self.num_submitted += 1
        head = self.chance.choice(self.prompts) if self.prompts and self.chance.random() < 0.7 else []
        tail = [self.chance.randrange(3) for _ in range(self.chance.choice((1, 2, 4, 8, 30)))]
        longest = min(LONGEST_PROMPT_TOKENS, self.scheduler.max_request_tokens - self.setting.verify_width)
        prompt = [*head, *tail][:longest]
        declares = self.setting.role == sc.Role.PREFILL or self.chance.random() < 0.6
        most = 5 if declares else 30
        num_generated = self.chance.randint(0, min(most, self.scheduler.max_request_tokens - len(prompt)))
        max_new_tokens = num_generated if declares else None
        is_remote = self.setting.role == sc.Role.DECODE and self.chance.random() < 0.7
        is_local = self.setting.role == sc.Role.DECODE and not is_remote
        self.scheduler.submit([spec(request_id, prompt, max_new_tokens=max_new_tokens, local_prefill=is_local)])
        self.prompts.append(prompt)
        self.tokens[request_id] = list(prompt)
        self.limits[request_id] = (len(prompt), max(1, num_generated))
        if is_remote:
            self.scheduler.advance([sc.ReadyEvent(request_id)])

    def step(self) -> bool:
        """One plan and its results; False when there was nothing to do."""
        self.memory.ask_storage()
        plan = self.scheduler.next_plan()
        self.num_hit_tokens += sum(admission.device_hit_tokens for admission in plan.admissions)
        self.num_host_hit_tokens += sum(admission.host_hit_tokens for admission in plan.admissions)
        self.num_storage_hit_tokens += sum(admission.storage_hit_tokens for admission in plan.admissions)
        self.num_retracted += len(plan.retracted)
        for request_id in plan.finished:
            assert request_id in self.ended
            self.peers.pop(request_id, None)
            del self.tokens[request_id], self.limits[request_id]
        self.memory.copy_ahead(plan)
        self._zero(plan)
        for grant in plan.remote_prefills:
            self.peers[grant.request_id] = Peer(grant=grant)
        for handover in plan.handovers:
            self.peers[handover.request_id].is_over = True
        if any(load.reads_storage.any() for load in plan.loads):
            self._land(0)  # a failure is told behind the results of earlier plans
        if self.memory.load(plan):
            self._compute(plan)
        self._land(self.setting.overlap_depth if self.chance.random() < 0.8 else 0)
        return not plan.is_empty

    def _land(self, num_out: int) -> None:
        while len(self.landing) > num_out:
            self.scheduler.advance(self.landing.pop(0))

    def acknowledge(self) -> None:
        self.memory.acknowledge_one()

    def _zero(self, plan: sc.Plan) -> None:
        for group, block_ids in enumerate(plan.zero_blocks):
            for block_id in block_ids.tolist():
                self.arena[group, block_id] = [()] * self.setting.groups[group].block_granularity

    def _compute(self, plan: sc.Plan) -> None:
        events: list[sc.Event] = []
        for row, request_id in enumerate(plan.request_ids):
            self._check_inputs(plan, row)
            new_tokens = self._generate(plan, row)
            events.append(sc.ResultEvent(request_id, new_tokens))
            is_decode = row >= plan.num_prefill_rows
            begin = len(self.tokens[request_id]) - 1 if is_decode else int(plan.begins[row])
            end = begin + (max(1, len(new_tokens)) if is_decode else int(plan.input_lengths[row]))
            self.tokens[request_id] += new_tokens
            for group in range(len(self.setting.groups)):
                self._compute_group(plan, row, group, begin, end)
            if self.setting.role == sc.Role.PREFILL:
                self._post(request_id, end)
            if self.setting.role != sc.Role.PREFILL and len(self.tokens[request_id]) == sum(self.limits[request_id]):
                events.append(sc.FinishEvent(request_id))
                self.ended.add(request_id)
        self.landing.append(events)

    def _generate(self, plan: sc.Plan, row: int) -> list[int]:
        """Of a decode row the drafts that were right, and the token behind them; none that is not wanted."""
        if row < plan.num_prefill_rows:
            return [self.chance.randrange(3)] * int(plan.logits_wanted[row])
        request_id = plan.request_ids[row]
        wanted = sum(self.limits[request_id]) - len(self.tokens[request_id])
        num_tokens = min(self.chance.randint(1, int(plan.input_lengths[row])), wanted)
        return [self.chance.randrange(3) for _ in range(num_tokens)]

    def _check_inputs(self, plan: sc.Plan, row: int) -> None:
        """A row begins where the plan says, or behind that by what the results on their way bring."""
        tokens = self.tokens[plan.request_ids[row]]
        first = int(plan.input_lengths[:row].sum())
        begin, length, num_out = (
            int(column[row]) for column in (plan.begins, plan.input_lengths, plan.num_results_out)
        )
        inputs = plan.token_ids[first : first + length].tolist()
        assert num_out <= self.setting.overlap_depth
        if row < plan.num_prefill_rows:
            assert inputs == tokens[begin : begin + length]
            return
        assert length <= self.setting.verify_width
        assert begin <= len(tokens) - 1 <= begin + num_out * (self.setting.verify_width - 1)
        assert inputs == ([-1] if num_out else tokens[-1:]) + [-1] * (length - 1)

    def _compute_group(self, plan: sc.Plan, row: int, group: int, begin: int, end: int) -> None:
        """Rows behind `end` hold drafts that turned out wrong; the next row writes there again."""
        if self.setting.groups[group].family == sc.Family.STATE:
            self._compute_state(plan, row, group, begin, end)
            return
        request_id, table = plan.request_ids[row], plan.block_tables[group][row].tolist()
        first_new = begin + int(plan.replay_lengths[row])
        for position in range(begin if self.setting.groups[group].replayable else first_new, end):
            self._write(group, table, position, self._row_at(request_id, position))
        for position in range(end, begin + int(plan.input_lengths[row])):
            self._write(group, table, position, (WRONG_DRAFT, position))
        self.check_rows(group, table, request_id, first_new, end)

    def _compute_state(self, plan: sc.Plan, row: int, group: int, begin: int, end: int) -> None:
        """A decode row leaves the state behind its last right draft, in the slot where that lies."""
        request_id, table = plan.request_ids[row], plan.block_tables[group][row].tolist()
        granularity = self.setting.groups[group].block_granularity
        if begin == int(plan.begins[row]):
            last = begin + int(plan.input_lengths[row]) - 1
            assert int(plan.state_input_slots[group][row]) == ((begin - 1) // granularity if begin else -1)
            assert int(plan.state_output_slots[group][row]) == last // granularity
        if begin:
            self.check_state(group, table[(begin - 1) // granularity], request_id, begin)
        checkpoint = int(plan.checkpoint_tokens[row])
        if checkpoint:
            assert begin < checkpoint < end
            self.write_state(group, table[(checkpoint - 1) // granularity], request_id, checkpoint)
        self.write_state(group, table[(end - 1) // granularity], request_id, end)

    def write_state(self, group: int, block_id: int, request_id: str, num_tokens: int) -> None:
        assert block_id > 0
        self.arena[group, block_id] = [tuple(self.tokens[request_id][:num_tokens])]

    def check_state(self, group: int, block_id: int, request_id: str, num_tokens: int) -> None:
        assert self.arena[group, block_id] == [tuple(self.tokens[request_id][:num_tokens])], (request_id, group)

    def _write(self, group: int, table: Sequence[int], position: int, row: Row) -> None:
        slot, offset = divmod(position, self.setting.groups[group].block_granularity)
        self.arena[group, table[slot]][offset] = row

    def _row_at(self, request_id: str, position: int) -> Row:
        return tuple(self.tokens[request_id][: position + 1])

    def check_rows(self, group: int, table: Sequence[int], request_id: str, begin: int, num_tokens: int) -> None:
        """Everything that queries from `begin` on can see."""
        granularity = self.setting.groups[group].block_granularity
        window = self.setting.groups[group].sliding_window_tokens or num_tokens + begin + 1
        for position in range(max(0, begin - window + 1), num_tokens):
            slot, offset = divmod(position, granularity)
            found = self.arena[group, table[slot]][offset]
            assert found == self._row_at(request_id, position), (request_id, group, position)

    def _post(self, request_id: str, num_computed: int) -> None:
        """Posts the blocks that a chunk completed, read from the table as it is now."""
        peer = self.peers.setdefault(request_id, Peer(num_posted_blocks=[0] * len(self.setting.groups)))
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
        granularity = self.setting.groups[group].block_granularity
        num_prompt = self.limits[request_id][0]
        last = (num_prompt - 1) // granularity
        if self.setting.groups[group].family == sc.Family.STATE:
            return last, last + 1 if is_whole else last
        window = self.setting.groups[group].sliding_window_tokens or num_prompt + 1
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
            granularity = self.setting.groups[group].block_granularity
            table = [0] * first_slot + block_ids.tolist()
            if self.setting.groups[group].family == sc.Family.STATE:
                assert len(block_ids) == 1
                self.write_state(group, table[-1], request_id, num_tokens)
                continue
            for position in range(first_slot * granularity, num_tokens):
                self._write(group, table, position, self._row_at(request_id, position))
        del self.peers[request_id]
        if request_id in self.ended:
            self.scheduler.advance([sc.QuiescedEvent(request_id)])
            return
        for group, held in enumerate(self.scheduler.block_tables(request_id)):
            if self.setting.groups[group].family == sc.Family.STATE:
                slot = (num_tokens - 1) // self.setting.groups[group].block_granularity
                self.check_state(group, held.tolist()[slot], request_id, num_tokens)
            else:
                self.check_rows(group, held.tolist(), request_id, num_tokens, num_tokens)
        self.scheduler.advance([sc.DoneEvent(request_id, 1)])
        self.tokens[request_id].append(1)
        if self.limits[request_id][1] == 1:
            self.scheduler.advance([sc.FinishEvent(request_id)])
            self.ended.add(request_id)

    def grant(self) -> None:
        if self.setting.role == sc.Role.PREFILL and self.peers:
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
            for request_id in sorted(self.peers) if self.setting.role == sc.Role.PREFILL else []:
                self.scheduler.advance([sc.GrantedEvent(request_id)])
            self.step()
            self.move_bytes()
            if self.chance.random() < 0.5:
                self.memory.acknowledge_all()
        self.memory.acknowledge_all()
        assert not self.tokens, f"these wait for ever:\n{self.scheduler.describe()}"
        assert self.scheduler.clear_cache()
        gauges = self.scheduler.capacity()
        assert gauges.empty_lcm_blocks == gauges.total_lcm_blocks
        assert gauges.empty_host_lcm_blocks == gauges.total_host_lcm_blocks


MOVES = (
    Node.submit,
    Node.submit,
    Node.step,
    Node.step,
    Node.step,
    Node.move_bytes,
    Node.grant,
    Node.end_one,
    Node.acknowledge,
)


def play(setting: Setting, seed: int, num_moves: int) -> Node:
    node = Node(setting=setting, chance=random.Random(seed))
    for _ in range(num_moves):
        node.chance.choice(MOVES)(node)
    node.run_to_the_end()
    return node


@pytest.mark.behaviour("I1", "J12", "L13", "L14", "T6")
@pytest.mark.behaviour("S5")
@settings(max_examples=120)
@given(
    setting=settings_with(GROUP_MIXES, verify_width=4, host_lcm_blocks=[0, 4, 40]),
    seed=st.integers(0, 2**32),
    num_moves=st.integers(1, 150),
)
def test_every_read_finds_what_was_written_for_it(setting: Setting, seed: int, num_moves: int) -> None:
    play(setting, seed, num_moves)


@pytest.mark.parametrize("role", [sc.Role.FUSED, sc.Role.PREFILL, sc.Role.DECODE])
@pytest.mark.parametrize("groups", GROUP_MIXES, ids=lambda groups: "+".join(group.group_id for group in groups))
def test_the_histories_reuse_prefixes(role: sc.Role, groups: list[sc.CacheGroupConfig]) -> None:
    setting = Setting(role=role, groups=groups)
    assert any(total > 100 for total in accumulate(play(setting, seed, 100).num_hit_tokens for seed in range(10)))


@pytest.mark.parametrize("role", [sc.Role.FUSED, sc.Role.DECODE])
@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_the_histories_make_requests_give_way(role: sc.Role, overlap_depth: int) -> None:
    mixes = (GROUP_MIXES[0], GROUP_MIXES[3], GROUP_MIXES[6])
    settings = [Setting(role=role, groups=groups, overlap_depth=overlap_depth) for groups in mixes]
    retractions = (play(setting, seed, 150).num_retracted for seed in range(10) for setting in settings)
    assert any(total > 10 for total in accumulate(retractions))


@pytest.mark.behaviour("F1")
@pytest.mark.behaviour("O3")
@pytest.mark.parametrize("role", [sc.Role.FUSED, sc.Role.PREFILL])
@pytest.mark.parametrize("groups", GROUP_MIXES, ids=lambda groups: "+".join(group.group_id for group in groups))
def test_the_histories_restore_prefixes_from_the_tiers_below(role: sc.Role, groups: list[sc.CacheGroupConfig]) -> None:
    setting = Setting(role=role, groups=groups, num_host_lcm_blocks=12, has_storage=True)
    num_host_hit_tokens = num_storage_hit_tokens = 0
    for seed in range(12):
        node = play(setting, seed, 100)
        num_host_hit_tokens += node.num_host_hit_tokens
        num_storage_hit_tokens += node.num_storage_hit_tokens
        if num_host_hit_tokens and num_storage_hit_tokens:
            return
    pytest.fail(f"{num_host_hit_tokens} tokens from the host, {num_storage_hit_tokens} from storage")


@pytest.mark.behaviour("O5")
@pytest.mark.parametrize("role", [sc.Role.FUSED, sc.Role.PREFILL])
def test_the_histories_lose_objects_of_the_storage(role: sc.Role) -> None:
    setting = Setting(role=role, groups=GROUP_MIXES[0], num_host_lcm_blocks=12, has_storage=True)
    assert any(play(setting, seed, 100).memory.num_failed_loads for seed in range(24))
