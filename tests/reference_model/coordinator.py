"""The cache of all groups: probe, admit, publish, slide. Speaks tokens and grains; knows no requests and no roles."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from reference_model.eviction_policies import AgedFrequency, LeastRecentlyUsed, PromptUses
from reference_model.evictions import Victim, plan_evictions
from reference_model.group_policies import Completed, GroupPolicy, Span, State
from reference_model.groups import INDEX, Entry, Group, Prefix, Use
from reference_model.pool import Pool, Table
from reference_model.promises import Promises
from reference_model.values import Eviction, SchedulerShape


@dataclass(frozen=True, slots=True)
class Hit:
    """What every group has cached. `entries`: by group, slot by slot; None is a slot that the group does not need.
    `closed_tokens`: what the closed groups alone back. `prefixes`: of all grains that were looked at."""

    tokens: int
    closed_tokens: int
    entries: list[list[Entry | None]]
    prefixes: list[Prefix]

    def claimed(self) -> list[Entry]:
        return [entry for entries in self.entries for entry in entries if entry is not None]


@dataclass(frozen=True, slots=True)
class Admitted:
    tables: list[Table]
    epoch: int
    uses: PromptUses | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Of a request that was admitted in `epoch`. `prefixes`: of all grains so far, `completed` the new ones."""

    prefixes: list[Prefix]
    completed: Completed
    epoch: int
    uses: PromptUses | None
    keeps_duplicates: bool

    def use_at(self, grain: int) -> Use:
        return Use() if self.uses is None else self.uses.at(grain)


class Coordinator:
    def __init__(self, shape: SchedulerShape, policies: Sequence[GroupPolicy]) -> None:
        self.prefix_granularity = shape.prefix_granularity
        self.pool = Pool(
            shape.num_lcm_blocks,
            [group.cache_blocks_per_lcm_block for group in shape.groups],
            [group.shard_count for group in shape.groups],
        )
        self.groups = [
            Group(position, group, policy, shape.prefix_granularity)
            for position, (group, policy) in enumerate(zip(shape.groups, policies, strict=True))
        ]
        self.promises = Promises(self.pool, self.groups, self.evict)
        self.eviction = self.make_eviction_policy(shape)
        self.last_epoch = 0

    def make_eviction_policy(self, shape: SchedulerShape) -> LeastRecentlyUsed:
        if shape.eviction is Eviction.LRU:
            return LeastRecentlyUsed()
        num_grains = [
            shape.num_lcm_blocks * group.shape.cache_blocks_per_lcm_block // group.slots_per_grain
            for group in self.groups
        ]
        return AgedFrequency(max_ghosts=max(num_grains))

    # Reading.

    def probe(self, prefixes: list[Prefix], *, is_state_sent: bool = False) -> Hit:
        """The longest run of grains that every group backs. Changes nothing. If a peer sends the final state, what is
        cached of states does not matter, and none is claimed."""
        closed = [group for group in self.groups if group.policy.is_closed]
        num_closed = self.num_backed(closed, prefixes, len(prefixes)) if closed else 0
        matched = [group for group in self.groups if not (is_state_sent and isinstance(group.policy, State))]
        num_grains = self.num_backed(matched, prefixes, num_closed if closed else len(prefixes))
        entries = []
        for group in self.groups:
            end_slot = group.policy.num_hit_slots(num_grains * self.prefix_granularity)
            needed = group.policy.slots_behind(end_slot) if group in matched else range(0)
            entries.append([group.find(prefixes, slot) if slot in needed else None for slot in range(end_slot)])
        return Hit(num_grains * self.prefix_granularity, num_closed * self.prefix_granularity, entries, prefixes)

    def num_backed(self, groups: Sequence[Group], prefixes: list[Prefix], bound: int) -> int:
        for num_grains in reversed(range(1, bound + 1)):
            if all(self.backs(group, prefixes, num_grains) for group in groups):
                return num_grains
        return 0

    def backs(self, group: Group, prefixes: list[Prefix], num_grains: int) -> bool:
        needed = group.policy.slots_behind(num_grains * group.slots_per_grain)
        return all(group.find(prefixes, slot) is not None for slot in needed)

    # Admitting.

    def fits(self, hit: Hit, span: Span) -> bool:
        return self.evictions_for(hit, span) is not None

    def evictions_for(self, hit: Hit, span: Span) -> list[Victim] | None:
        """What must go for an admission; None if it does not fit. Full groups acquire all that the request can ever
        need, the others promise the most that it can hold at one time."""
        demand = [
            self.end_slot(group, span) - len(entries)
            if group.policy.is_closed
            else self.promises.num_missing(group, self.to_promise(group, span), entries)
            for group, entries in zip(self.groups, hit.entries, strict=True)
        ]
        return plan_evictions(self.pool, self.groups, demand, protected=hit.claimed())

    def demand_without(self, span: Span, hit_tokens: int, gone: Collection[str]) -> list[int]:
        """What an admission behind a hit must acquire at least, if these owners of tables were gone."""
        return [
            self.end_slot(group, span) - group.policy.num_hit_slots(hit_tokens)
            if group.policy.is_closed
            else self.promises.num_missing_without(group, self.to_promise(group, span), gone)
            for group in self.groups
        ]

    def demand_to_secure(self, tables: list[Table], num_tokens: int) -> list[int]:
        ends = [group.policy.blocks_for(num_tokens) if group.policy.is_closed else 0 for group in self.groups]
        return [max(0, end - len(table.slots)) for end, table in zip(ends, tables, strict=True)]

    def admit(self, owner: str, hit: Hit, span: Span) -> Admitted:
        """All groups at once: claims the hits, evicts what must go and acquires blocks for `span` behind them. Takes
        the next epoch and stamps the hits with it. REQUIRES: it fits."""
        victims = self.evictions_for(hit, span)
        assert victims is not None
        self.last_epoch += 1
        uses = self.eviction.uses_for(hit.prefixes, self.by_grain(hit))
        tables = [self.claim(owner, entries, uses) for entries in hit.entries]
        for victim in victims:
            self.evict(victim)
        self.promises.promise(owner, [self.to_promise(group, span) for group in self.groups])
        for group, table in zip(self.groups, tables, strict=True):
            self.fill(group, table, group.policy.first_slot(span), self.end_slot(group, span))
        return Admitted(tables, self.last_epoch, uses)

    def to_promise(self, group: Group, span: Span) -> int:
        if group.policy.is_closed:
            return 0
        return group.policy.held_at_most(span.num_prompt_tokens, span.num_limit_tokens, is_local=span.is_local)

    def end_slot(self, group: Group, span: Span) -> int:
        return group.policy.blocks_for(span.end + group.policy.reserve_tokens(span))

    def grain_of(self, entry: Entry) -> int:
        return (entry.end_token - 1) // self.prefix_granularity

    def by_grain(self, hit: Hit) -> list[list[Entry]]:
        num_grains = hit.tokens // self.prefix_granularity
        return [[entry for entry in hit.claimed() if self.grain_of(entry) == grain] for grain in range(num_grains)]

    def claim(self, owner: str, entries: list[Entry | None], uses: PromptUses | None) -> Table:
        table = Table(owner)
        for entry in entries:
            if entry is not None:
                entry.refresh(self.last_epoch, entry.boundary, Use() if uses is None else uses.at(self.grain_of(entry)))
                entry.was_hit = True
                entry.block.owners.append(owner)
            table.slots.append(None if entry is None else entry.block)
        return table

    def fill(self, group: Group, table: Table, first_slot: int, end_slot: int) -> list[int]:
        """Appends holes up to `first_slot`, then blocks. Gives the ids of the blocks. Slots that are there stay."""
        table.slots += [None] * (first_slot - len(table.slots))
        fresh = []
        while len(table.slots) < end_slot:
            if group.policy.is_closed:
                block = self.pool.acquire(group.position, table.owner, beside=table.blocks())
            else:
                block = self.promises.take(table, group)
            table.slots.append(block)
            fresh.append(block.block_id)
        return fresh

    def grow(self, tables: list[Table], span: Span) -> list[list[int]]:
        """A later chunk of a prompt. Gives the ids of fresh blocks by group."""
        return [
            self.fill(group, table, group.policy.first_slot(span), self.end_slot(group, span))
            for group, table in zip(self.groups, tables, strict=True)
        ]

    def secure(self, tables: list[Table], num_tokens: int) -> list[list[int]] | None:
        """Room for as many tokens in the full groups. None, with nothing changed, if it cannot be had, else the ids of
        fresh blocks by group."""
        victims = plan_evictions(self.pool, self.groups, self.demand_to_secure(tables, num_tokens))
        if victims is None:
            return None
        for victim in victims:
            self.evict(victim)
        ends = [group.policy.blocks_for(num_tokens) if group.policy.is_closed else 0 for group in self.groups]
        return [self.fill(*parts) for parts in zip(self.groups, tables, [0] * len(ends), ends, strict=True)]

    def cover(self, tables: list[Table], num_tokens: int) -> list[list[int]]:
        """The same in all groups, where it is secured or promised."""
        return [
            self.fill(group, table, 0, group.policy.blocks_for(num_tokens))
            for group, table in zip(self.groups, tables, strict=True)
        ]

    def slide(self, tables: list[Table], num_computed_tokens: int) -> None:
        """Gives up what no later token can see."""
        for group, table in zip(self.groups, tables, strict=True):
            self.pool.release_front(table, group.policy.num_expired_slots(num_computed_tokens))
        self.promises.settle()

    # Publishing.

    def publish(self, tables: list[Table], publication: Publication) -> None:
        """Where the content is there already, the table goes over to the block that has it. Its own is dropped, or
        kept while the table lives if a transfer may still read it; where blocks are promised by number that would be
        one too many, so there it stays in its slot."""
        completed = publication.completed
        for grain in range(completed.begin // self.prefix_granularity, completed.end // self.prefix_granularity):
            self.eviction.note_published(publication.prefixes[grain])
        for group, table in zip(self.groups, tables, strict=True):
            for slot in group.policy.slots_to_publish(completed):
                if table.slots[slot] is not None:
                    self.publish_slot(group, table, slot, publication)
        self.promises.settle()

    def publish_slot(self, group: Group, table: Table, slot: int, publication: Publication) -> None:
        own, entry = table.slots[slot], group.find(publication.prefixes, slot)
        assert own is not None
        boundary, use = publication.completed.boundary, publication.use_at(slot // group.slots_per_grain)
        if entry is None:
            group.enter(publication.prefixes, slot, own, publication.epoch, boundary, use)
            return
        entry.refresh(publication.epoch, boundary, use)
        if entry.block is own or (publication.keeps_duplicates and not group.policy.is_closed):
            return
        entry.block.owners.append(table.owner)
        table.slots[slot] = entry.block
        if publication.keeps_duplicates:
            table.duplicates.append(own)
        else:
            self.pool.release(own, table.owner)

    # Dropping.

    def evict(self, victim: Victim) -> None:
        entry = victim.entry
        ends_grain = entry.end_token % self.prefix_granularity == 0
        self.eviction.note_evicted(entry, self.grain_of(entry), ends_grain=ends_grain)
        self.drop(victim.group, entry)

    def drop(self, group: Group, entry: Entry) -> None:
        group.entries.remove(entry)
        self.pool.release(entry.block, INDEX)

    def clear(self) -> None:
        """No eviction: nothing is remembered of it. The entries go in eviction order, group by group."""
        for group in self.groups:
            for entry in sorted(group.evictable(), key=group.rank):
                self.drop(group, entry)
        self.eviction.note_cleared()

    def release(self, tables: list[Table]) -> None:
        """The end of a request: its tables, then what it was promised."""
        for table in tables:
            self.pool.release_table(table)
        if tables:
            self.promises.end(tables[0].owner)

    def lower_to_held(self, tables: list[Table]) -> None:
        """The request acquires nothing any more."""
        self.promises.lower(tables[0].owner, [len(table.blocks()) for table in tables])

    def lower_to_decoding(self, tables: list[Table]) -> None:
        """There will be no more chunks."""
        numbers = [0 if group.policy.is_closed else group.policy.held_while_decoding() for group in self.groups]
        self.promises.lower(tables[0].owner, numbers)
