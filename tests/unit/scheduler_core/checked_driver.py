"""A runtime with peers, played at random, that keeps its own books of the scheduler and checks them after every step.

The checks know nothing of how the core works; they read tables, plans and gauges. Every parent is empty, active, cached
or quarantined; no two requests own a block unless it is a shared prefix; an admission secures its prompt and its
headroom or nothing; what is hit was announced as a prefix; who was retracted has no row and holds no block; at rest
every block is back.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import scheduler_core as sc

from .builders import spec
from .prefix_router import Router, hashes_of
from .random_settings import Setting
from .tier_runtime import HostMemory

GENERATED = 7  # every generated token


@dataclass(slots=True)
class Owed:
    """A row whose result is out. `most`: tokens that it can bring, all of them exactly one unless it verifies."""

    most: int
    is_decode: bool


@dataclass(slots=True)
class Driver:
    """Plays a runtime with peers at random and keeps its own books."""

    setting: Setting
    chance: random.Random
    scheduler: sc.Scheduler = field(init=False)
    memory: HostMemory[int] = field(init=False)  # the books know nothing of contents
    lengths: dict[str, tuple[int, int | None]] = field(default_factory=dict)  # as submitted
    generated: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)  # what a prefill computes
    owed: dict[str, list[Owed]] = field(default_factory=dict)  # oldest first
    remote_prompts: set[str] = field(default_factory=set)
    tokens: dict[str, list[int]] = field(default_factory=dict)  # as submitted
    hashes: dict[str, list[int]] = field(default_factory=dict)  # of a prefill's grains, as they are announced
    router: Router = field(default_factory=Router)
    transferring: set[str] = field(default_factory=set)  # a peer reads or writes blocks of these
    landed: set[str] = field(default_factory=set)  # these may finish
    quarantined: set[str] = field(default_factory=set)
    held: dict[str, list[set[int]]] = field(default_factory=dict)  # prefill role: blocks ever seen in a live table
    num_retracted: int = 0
    gave_way: set[str] = field(default_factory=set)  # for want of memory
    log: list[str] = field(default_factory=list)
    num_submitted: int = 0
    num_lcm_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_lcm_blocks = self.chance.choice((7, 14)) + 2 * self.setting.verify_width
        self.num_lcm_blocks += 6 * max(0, len(self.open_groups) + len(self.setting.groups) - 2)
        self.scheduler = self.setting.make_scheduler(
            self.chance, num_lcm_blocks=self.num_lcm_blocks, token_budget=9, enable_prefix_events=True
        )
        self.memory = HostMemory(self.scheduler, defaultdict(int), self.chance, int, self.setting.has_storage)

    @property
    def open_groups(self) -> list[str]:
        """Groups whose blocks expire."""
        sliding = sc.Retention.SLIDING_WINDOW
        return [g.group_id for g in self.setting.groups if g.retention == sliding or g.family == sc.Family.STATE]

    def submit(self) -> None:
        request_id = f"r{self.num_submitted}"
        self.num_submitted += 1
        stem = self.chance.choice((0, 0, 0, 500))
        length = self.chance.randint(1, min(24, self.scheduler.max_request_tokens - 6))
        is_undeclared = self.setting.role != sc.Role.PREFILL and self.chance.random() < 0.4
        max_new_tokens = None if is_undeclared else self.chance.randint(0, 5)
        local = self.setting.role == sc.Role.DECODE and self.chance.random() < 0.25
        tokens = list(range(stem, stem + length))
        self.scheduler.submit([spec(request_id, tokens, max_new_tokens=max_new_tokens, local_prefill=local)])
        self.lengths[request_id] = (length, max_new_tokens)
        self.generated[request_id] = 0
        self.tokens[request_id] = tokens
        self.hashes[request_id] = hashes_of(tokens)
        self.prompts[request_id] = length
        if self.setting.role == sc.Role.DECODE and not local:
            self.scheduler.advance([sc.ReadyEvent(request_id)])
            self.remote_prompts.add(request_id)

    def plan(self) -> None:
        self.router.drain(self.scheduler)
        announced = set(self.router.stored)
        self.memory.ask_storage()
        plan = self.scheduler.next_plan()
        self.router.drain(self.scheduler)
        self.check_hits(plan, announced | set(self.router.stored))
        self.log.append(repr_of(plan))
        self.check_plan(plan)
        self.memory.copy_ahead(plan)
        for row, request_id in enumerate(plan.request_ids):
            num_results_out = len(self.owed.setdefault(request_id, []))
            assert int(plan.num_results_out[row]) == num_results_out <= self.setting.overlap_depth
        if any(load.reads_storage.any() for load in plan.loads):
            while any(self.owed.values()):
                self.land_results()
        for row, request_id in enumerate(plan.request_ids):
            owed = self.owed[request_id]
            is_decode = row >= plan.num_prefill_rows
            owed.append(Owed(int(plan.input_lengths[row] if is_decode else plan.logits_wanted[row]), is_decode))
            if self.setting.role == sc.Role.PREFILL:
                self.transferring.add(request_id)
        for grant in plan.remote_prefills:
            self.transferring.add(grant.request_id)
        for handover in plan.handovers:
            self.landed.add(handover.request_id)
        for request_id in plan.retracted:
            assert not self.owed.get(request_id)
            assert request_id not in [*plan.request_ids, *plan.finished]
            self.num_retracted += 1
            self.gave_way.add(request_id)
            self.start_over(request_id)
        for request_id in plan.finished:
            self.forget(request_id)
        if not self.memory.load(plan):
            for request_id in plan.request_ids:
                self.owed.pop(request_id)
                self.held.pop(request_id, None)
                self.transferring.discard(request_id)
                self.start_over(request_id)

    def acknowledge(self) -> None:
        self.memory.acknowledge_one()

    def start_over(self, request_id: str) -> None:
        tokens = [*self.tokens[request_id], *[GENERATED] * self.generated[request_id]]
        self.prompts[request_id] = len(tokens)
        self.hashes[request_id] = hashes_of(tokens)
        self.remote_prompts.discard(request_id)
        assert not any(map(len, self.scheduler.block_tables(request_id)))

    def num_wanted(self, request_id: str) -> int:
        """Tokens that may still be generated."""
        length, max_new_tokens = self.lengths[request_id]
        limit = self.scheduler.max_request_tokens
        return (limit if max_new_tokens is None else length + max_new_tokens) - length - self.generated[request_id]

    def retract_one(self) -> None:
        names = self.in_phases("prefilling", "awaiting_result", "prefill_done", "decoding")
        if names and self.setting.role != sc.Role.PREFILL and self.chance.random() < 0.3:
            request_id = self.chance.choice(names)
            self.scheduler.advance([sc.RetractEvent(request_id)])
            self.owed.pop(request_id, None)
            self.start_over(request_id)

    def in_phases(self, *phases: str) -> list[str]:
        lines = [line.split() for line in self.scheduler.describe().splitlines() if line.startswith("request ")]
        return [name for _, name, phase, *_ in lines if phase in phases]

    def forget(self, request_id: str) -> None:
        del self.lengths[request_id], self.generated[request_id], self.prompts[request_id]
        self.owed.pop(request_id, None)
        self.held.pop(request_id, None)
        for names in (self.transferring, self.landed, self.quarantined):
            names.discard(request_id)

    def land_results(self) -> None:
        """Those of each request's oldest row, or all that are out."""
        events: list[sc.Event] = []
        most_rows = self.chance.randint(1, 2)
        for request_id, owed in self.owed.items():
            for row in owed[:most_rows]:
                num_tokens = self.num_landing(request_id, row)
                self.generated[request_id] += num_tokens
                events.append(sc.ResultEvent(request_id, [GENERATED] * num_tokens))
                if row.most and self.setting.role != sc.Role.PREFILL:
                    self.landed.add(request_id)
            del owed[:most_rows]
        self.scheduler.advance(events)

    def num_landing(self, request_id: str, row: Owed) -> int:
        """A row that was planned ahead brings none when the one before it brought the last one wanted."""
        wanted = self.num_wanted(request_id)
        return self.chance.randint(min(1, wanted), min(row.most, wanted)) if row.is_decode else row.most

    def finish_one(self) -> None:
        """Not in the middle of a recovery: there is nothing new that could have ended it."""
        in_recovery = self.in_phases("prefilling", "awaiting_result") if self.setting.role != sc.Role.PREFILL else []
        candidates = sorted(self.landed - self.quarantined - set(in_recovery))
        if candidates:
            request_id = self.chance.choice(candidates)
            handed_over = self.setting.role == sc.Role.PREFILL
            self.scheduler.advance([sc.HandedOverEvent(request_id) if handed_over else sc.FinishEvent(request_id)])
            self.landed.discard(request_id)
            self.transferring.discard(request_id)

    def done_one(self) -> None:
        candidates = sorted(self.transferring - self.quarantined)
        if candidates and self.setting.role == sc.Role.DECODE:
            request_id = self.chance.choice(candidates)
            self.scheduler.advance([sc.DoneEvent(request_id, GENERATED)])
            self.generated[request_id] += 1
            self.transferring.discard(request_id)
            self.landed.add(request_id)

    def grant_one(self) -> None:
        if self.setting.role == sc.Role.PREFILL and self.lengths:
            self.scheduler.advance([sc.GrantedEvent(self.chance.choice(sorted(self.lengths)))])

    def abort_one(self) -> None:
        if self.lengths:
            request_id = self.chance.choice(sorted(self.lengths))
            failed = self.setting.role != sc.Role.FUSED and request_id in self.transferring
            self.scheduler.advance([sc.FailedEvent(request_id) if failed else sc.AbortEvent(request_id)])
            self.owed.pop(request_id, None)
            self.landed.discard(request_id)
            if request_id in self.transferring:
                self.quarantined.add(request_id)

    def quiesce_one(self) -> None:
        if self.quarantined:
            request_id = self.chance.choice(sorted(self.quarantined))
            self.scheduler.advance([sc.QuiescedEvent(request_id)])
            self.quarantined.discard(request_id)
            self.transferring.discard(request_id)

    def repeat_late_events(self) -> None:
        before = self.scheduler.describe()
        events: list[sc.Event] = [sc.ResultEvent("gone", [1]), sc.AbortEvent("gone")]
        if self.setting.role != sc.Role.FUSED:
            events += [sc.QuiescedEvent("gone"), sc.FailedEvent("gone")]
        events += [sc.AbortEvent(request_id) for request_id in sorted(self.quarantined)]
        self.scheduler.advance(events)
        assert self.scheduler.describe() == before

    def check_hits(self, plan: sc.Plan, announced: set[int]) -> None:
        """A hit ends at a grain that was announced, unless a peer sends the state of that boundary."""
        has_state = any(group.family == sc.Family.STATE for group in self.setting.groups)
        for admission in plan.admissions:
            if admission.device_hit_tokens and not (has_state and admission.request_id in self.remote_prompts):
                assert self.hashes[admission.request_id][admission.device_hit_tokens // 4 - 1] in announced

    def check_plan(self, plan: sc.Plan) -> None:
        assert plan.num_rows <= 3
        assert len(set(plan.request_ids)) == plan.num_rows
        num_decode_rows = plan.num_rows - plan.num_prefill_rows
        cost_tokens = (
            int(plan.input_lengths[: plan.num_prefill_rows].sum()) + num_decode_rows * self.setting.verify_width
        )
        assert self.setting.role == sc.Role.DECODE or cost_tokens <= 9
        slots = plan.request_slots.tolist()
        assert len(set(slots)) == len(slots)
        assert all(slot > 0 for slot in slots)
        for zeroed in plan.zero_blocks:
            assert len(set(zeroed.tolist())) == len(zeroed)
        for row, request_id in enumerate(plan.request_ids):
            end = int(plan.begins[row] + plan.input_lengths[row])
            for index, (group, table) in enumerate(zip(self.setting.groups, plan.block_tables, strict=True)):
                begin = int(plan.begins[row])
                if group.family == sc.Family.STATE:
                    assert begin % 4 == 0 or row >= plan.num_prefill_rows
                    touched = [int(plan.state_output_slots[index][row])]
                    touched += [int(plan.state_input_slots[index][row])] if begin else []
                else:
                    first_new = begin + int(plan.replay_lengths[row])
                    window = group.sliding_window_tokens
                    first_seen = max(0, first_new - window + 1) if window else 0
                    touched = list(range(first_seen // group.block_granularity, -(-end // group.block_granularity)))
                assert all(table[row][slot] > 0 for slot in touched), request_id
        if self.setting.role == sc.Role.DECODE and plan.num_prefill_rows:
            assert plan.num_rows == 1
            assert not plan.remote_prefills
        for admission in plan.admissions:
            prompt_tokens = self.prompts[admission.request_id]
            hits = (admission.device_hit_tokens, admission.host_hit_tokens, admission.storage_hit_tokens)
            assert sum(hits) < prompt_tokens
            assert all(hit_tokens >= 0 and hit_tokens % 4 == 0 for hit_tokens in hits)
            reserve = self.reserve_of(plan, admission.request_id)
            tables = self.scheduler.block_tables(admission.request_id)
            for group, slots_of_table in zip(self.setting.groups, tables, strict=True):
                if group.group_id in self.open_groups:
                    continue
                assert len(slots_of_table) == -(-(prompt_tokens + reserve) // group.block_granularity)

    def reserve_of(self, plan: sc.Plan, request_id: str) -> int:
        """Tokens behind the prompt that an admission secures. Of a completion without an end it is the first step, once
        the prompt is complete or, of a request that gave way before, at once."""
        step = min(self.setting.verify_width, self.scheduler.max_request_tokens - self.prompts[request_id])
        if self.setting.role == sc.Role.PREFILL:
            return step
        ahead = self.setting.overlap_depth * self.setting.verify_width
        if self.lengths[request_id][1] is not None:
            return max(step, self.num_wanted(request_id)) + ahead
        if request_id in self.gave_way and step:
            return step + ahead
        rows = dict(zip(plan.request_ids, (plan.begins + plan.input_lengths).tolist(), strict=True))
        return step if rows.get(request_id, self.prompts[request_id]) == self.prompts[request_id] else 0

    def check_state(self) -> None:
        gauges = self.scheduler.capacity()
        assert gauges.total_lcm_blocks == self.num_lcm_blocks
        assert gauges.num_live_requests >= gauges.num_waiting + gauges.num_running
        parents: Counter[int] = Counter()
        active, quarantined = set(), set()
        for index, group in enumerate(self.setting.groups):
            for request_id in self.live_ids():
                for block_id in self.blocks_of(request_id)[index]:
                    if block_id:
                        parent = (block_id - 1) // group.cache_blocks_per_lcm_block + 1
                        parents[parent] |= 1 << index
                        held_back = self.setting.role == sc.Role.DECODE and request_id in self.quarantined
                        (quarantined if held_back else active).add(parent)
        assert all(groups.bit_count() == 1 for groups in parents.values()), "a parent serves one group"
        assert gauges.quarantined_lcm_blocks == len(quarantined)
        num_kept_parents = gauges.active_lcm_blocks - len(active - quarantined)
        num_copies = sum(len(copies.copies) for copies in [*self.memory.stores.values(), *self.memory.loads.values()])
        assert 0 <= num_kept_parents <= sum(self.check_promises()) + num_copies
        assert gauges.total_host_lcm_blocks == self.setting.num_host_lcm_blocks
        assert gauges.active_host_lcm_blocks <= num_copies
        rest = gauges.empty_host_lcm_blocks + gauges.active_host_lcm_blocks + gauges.cached_host_lcm_blocks
        assert rest == self.setting.num_host_lcm_blocks
        in_use = len(active | quarantined) + num_kept_parents
        assert gauges.empty_lcm_blocks + gauges.cached_lcm_blocks == self.num_lcm_blocks - in_use

    def check_promises(self) -> list[int]:
        """What is kept back per group: all that was promised and is in no table."""
        lines = [line.split() for line in self.scheduler.describe().splitlines() if line.startswith("group ")]
        num_kept = []
        for index, (_, group_id, *words) in enumerate(lines):
            if group_id in self.open_groups:
                gauges = dict(word.split("=") for word in words)
                tables = [self.scheduler.block_tables(request_id)[index].tolist() for request_id in self.live_ids()]
                num_held = len({block_id for table in tables for block_id in table if block_id})
                assert int(gauges["promised"]) == num_held + int(gauges["kept"])
                num_kept.append(int(gauges["kept"]))
        return num_kept

    def blocks_of(self, request_id: str) -> list[set[int]]:
        """Per group. On the prefill role a block of a full group stays taken to the end, also when its slot shares
        another by then."""
        tables = [set(table.tolist()) for table in self.scheduler.block_tables(request_id)]
        if self.setting.role != sc.Role.PREFILL or not any(tables):
            return tables
        held = self.held.setdefault(request_id, [set() for _ in tables])
        for index, (group, table) in enumerate(zip(self.setting.groups, tables, strict=True)):
            held[index] = table if group.group_id in self.open_groups else held[index] | table
        return held

    def live_ids(self) -> list[str]:
        return [line.split()[1] for line in self.scheduler.describe().splitlines() if line.startswith("request ")]

    def come_to_rest(self) -> None:
        self.scheduler.advance([sc.AbortEvent(request_id) for request_id in sorted(self.lengths)])
        if self.setting.role != sc.Role.FUSED:
            self.scheduler.advance([sc.QuiescedEvent(request_id) for request_id in sorted(self.lengths)])
        self.memory.copy_ahead(self.scheduler.next_plan())
        self.memory.acknowledge_all()
        gauges = self.scheduler.capacity()
        assert (gauges.num_live_requests, gauges.active_lcm_blocks, gauges.quarantined_lcm_blocks) == (0, 0, 0)
        assert self.scheduler.clear_cache()
        self.router.drain(self.scheduler)
        assert not self.router.stored
        assert self.scheduler.capacity().empty_lcm_blocks == self.num_lcm_blocks
        assert self.scheduler.capacity().empty_host_lcm_blocks == self.setting.num_host_lcm_blocks


def repr_of(plan: sc.Plan) -> str:
    grants = [(g.request_id, g.from_token, [ids.tolist() for ids in g.block_ids]) for g in plan.remote_prefills]
    tables = [table.tolist() for table in plan.block_tables]
    zeroed = [ids.tolist() for ids in plan.zero_blocks]
    copies = [copy.copies.tolist() for copy in [*plan.stores, *plan.loads]]
    return repr((plan.request_ids, plan.token_ids.tolist(), tables, zeroed, copies, grants, plan.finished))


MOVES = (
    Driver.submit,
    Driver.submit,
    Driver.plan,
    Driver.plan,
    Driver.plan,
    Driver.land_results,
    Driver.land_results,
    Driver.finish_one,
    Driver.done_one,
    Driver.grant_one,
    Driver.abort_one,
    Driver.quiesce_one,
    Driver.retract_one,
    Driver.repeat_late_events,
    Driver.acknowledge,
)


def play(setting: Setting, seed: int, num_moves: int, *, is_checked: bool = True) -> Driver:
    driver = Driver(setting=setting, chance=random.Random(seed))
    for _ in range(num_moves):
        driver.chance.choice(MOVES)(driver)
        if is_checked:
            driver.check_state()
    return driver
