"""The cache of all groups: probe, admit, publish, slide. Speaks tokens and grains; knows no requests and no roles."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from reference_model.eviction_policies import AgedFrequency, LeastRecentlyUsed, PromptUses
from reference_model.evictions import Victim, plan_evictions
from reference_model.group_policies import Boundary, Completed, GroupPolicy, SlidingWindow, Span, State
from reference_model.groups import INDEX, Entry, Group, Key, Prefix, Use
from reference_model.pool import Block, Pool, Table, is_transfer
from reference_model.promises import Promises
from reference_model.tiers import HIT, Tiers, Transfer, content_of
from reference_model.values import Eviction, SchedulerShape


@dataclass(slots=True)
class Extra:
    """A slot of a hit behind what the device backs. `resident`: the device's own block all the same; else `copy`, the
    host's; with neither storage is read. `device` and `host`: what a load goes to and comes from, once it is there."""

    key: Key
    slot: int
    resident: Entry | None
    copy: Entry | None
    device: Block | None = None
    host: Block | None = None
    name: str = ""

    @property
    def reads_storage(self) -> bool:
        return self.resident is None and self.copy is None


@dataclass(frozen=True, slots=True)
class Hit:
    """What every group has cached. `device_tokens`: what the device backs, and `extras`, by group, what comes from
    below behind that. `entries`: by group, slot by slot; None is a slot that the group does not need.
    `closed_tokens`: what the closed groups alone back. `prefixes`: of all grains that were looked at."""

    tokens: int
    closed_tokens: int
    entries: list[list[Entry | None]]
    prefixes: list[Prefix]
    device_tokens: int
    extras: list[list[Extra]]

    def reads_storage(self) -> bool:
        return any(extra.reads_storage for extras in self.extras for extra in extras)

    def num_loads(self, group: int) -> int:
        return sum(extra.resident is None for extra in self.extras[group])

    def held(self, group: int) -> list[Entry | None]:
        return self.entries[group] + [extra.resident for extra in self.extras[group]]

    def claimed(self) -> list[Entry]:
        return [entry for group in range(len(self.entries)) for entry in self.held(group) if entry is not None]


class StoreScope(Enum):
    """What the host is to have of what is published."""

    NOTHING = "nothing"
    WINDOWS = "windows"
    EVERYTHING = "everything"

    def covers(self, policy: GroupPolicy) -> bool:
        return self is StoreScope.EVERYTHING or (self is StoreScope.WINDOWS and isinstance(policy, SlidingWindow))


@dataclass(frozen=True, slots=True)
class Admitted:
    tables: list[Table]
    epoch: int
    uses: PromptUses | None
    storage_hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Of a request that was admitted in `epoch`. `prefixes`: of all grains so far, `completed` the new ones."""

    prefixes: list[Prefix]
    completed: Completed
    epoch: int
    uses: PromptUses | None
    keeps_duplicates: bool
    stored: StoreScope

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
        self.tiers = Tiers(shape, self.groups) if shape.num_host_lcm_blocks else None

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
        """With what lies below the device behind it, unless a peer computes the rest."""
        hit = self.probe_device(prefixes, is_state_sent=is_state_sent)
        return hit if is_state_sent else self.extend(hit, len(prefixes))

    def probe_device(self, prefixes: list[Prefix], *, is_state_sent: bool = False) -> Hit:
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
        extras: list[list[Extra]] = [[] for _ in self.groups]
        num_tokens = num_grains * self.prefix_granularity
        return Hit(num_tokens, num_closed * self.prefix_granularity, entries, prefixes, num_tokens, extras)

    def extend(self, hit: Hit, bound: int) -> Hit:
        """Behind the device's hit the groups converge on the host in the same way; what lies before counts as there. Of
        an open group only what is read behind the whole hit is claimed, on either tier."""
        num_device_grains = hit.device_tokens // self.prefix_granularity
        closed = [group for group in self.groups if group.policy.is_closed]
        num_closed = self.num_extended(closed, hit, bound) if closed else 0
        num_grains = self.num_extended(self.groups, hit, bound)
        hit = replace(hit, closed_tokens=max(hit.closed_tokens, num_closed * self.prefix_granularity))
        if num_grains == num_device_grains:
            return hit
        entries: list[list[Entry | None]] = []
        extras = []
        for group, found in zip(self.groups, hit.entries, strict=True):
            needed = group.policy.slots_behind(num_grains * group.slots_per_grain)
            entries.append([entry if slot in needed else None for slot, entry in enumerate(found)])
            first_slot = num_device_grains * group.slots_per_grain
            extras.append([self.extra(group, hit.prefixes, slot) for slot in needed if slot >= first_slot])
        return replace(hit, tokens=num_grains * self.prefix_granularity, entries=entries, extras=extras)

    def extra(self, group: Group, prefixes: list[Prefix], slot: int) -> Extra:
        assert self.tiers is not None
        key = group.key_of(prefixes, slot)
        resident = group.find(prefixes, slot)
        return Extra(key, slot, resident, None if resident is not None else self.tiers.find(key))

    def num_extended(self, groups: Sequence[Group], hit: Hit, bound: int) -> int:
        num_device_grains = hit.device_tokens // self.prefix_granularity
        for num_grains in reversed(range(num_device_grains + 1, bound + 1 if self.tiers is not None else 0)):
            if all(self.extends(group, hit.prefixes, num_device_grains, num_grains) for group in groups):
                return num_grains
        return num_device_grains

    def extends(self, group: Group, prefixes: list[Prefix], num_device_grains: int, num_grains: int) -> bool:
        assert self.tiers is not None
        needed = group.policy.slots_behind(num_grains * group.slots_per_grain)
        first_slot = num_device_grains * group.slots_per_grain
        return all(self.tiers.has(group.key_of(prefixes, slot)) for slot in needed if slot >= first_slot)

    def storage_keys(self, prefixes: list[Prefix]) -> list[Key]:
        """Of the grains behind the device's hit, whatever the host does not have."""
        if self.tiers is None or self.tiers.shadow is None:
            return []
        first_grain = self.probe_device(prefixes).tokens // self.prefix_granularity
        keys = [
            Key(group.position, prefix, offset)
            for prefix in prefixes[first_grain:]
            for group in self.groups
            if not group.shape.is_replayable
            for offset in range(group.slots_per_grain)
        ]
        return [key for key in keys if self.tiers.find(key) is None]

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
            self.end_slot(group, span) - len(hit.held(group.position)) + hit.num_loads(group.position)
            if group.policy.is_closed
            else self.promises.num_missing(group, self.to_promise(group, span), hit.held(group.position))
            for group in self.groups
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

    def admit(self, owner: str, hit: Hit, span: Span) -> Admitted | int:
        """All groups at once: claims the hits, evicts what must go and acquires blocks for `span` behind them. Takes
        the next epoch and stamps the hits with it. If what comes from below finds no place on the host or in its
        bucket, gives the shorter hit (tokens) that is left to try. REQUIRES: it fits."""
        victims = self.evictions_for(hit, span)
        assert victims is not None
        self.hold(owner, hit)
        placed_tokens = self.place_reads(hit)
        if placed_tokens < hit.tokens:
            self.let_go(owner, hit)
            return placed_tokens
        uses = self.eviction.uses_for(hit.prefixes, self.by_grain(hit))
        for victim in victims:
            self.evict(victim)
        self.promises.promise(owner, [self.to_promise(group, span) for group in self.groups])
        acquired_tokens = self.acquire_destinations(owner, hit, span)
        if acquired_tokens < hit.tokens:
            self.let_go(owner, hit)
            self.promises.end(owner)
            return acquired_tokens
        self.last_epoch += 1
        tables = [self.claim(owner, entries, uses) for entries in hit.entries]
        grains_read = {self.grain_at(extra) for extras in hit.extras for extra in extras if extra.reads_storage}
        for group, table in zip(self.groups, tables, strict=True):
            self.take_over(group, table, hit, grains_read, uses)
        for group, table in zip(self.groups, tables, strict=True):
            self.fill(group, table, group.policy.first_slot(span), self.end_slot(group, span))
        return Admitted(tables, self.last_epoch, uses, len(grains_read) * self.prefix_granularity)

    def grain_at(self, extra: Extra) -> int:
        return extra.slot // self.groups[extra.key.group].slots_per_grain

    def hold(self, owner: str, hit: Hit) -> None:
        for entry in hit.claimed():
            entry.block.owners.append(owner)
        for extra in [extra for extras in hit.extras for extra in extras if extra.resident is None]:
            assert self.tiers is not None
            extra.name = self.tiers.next_name()
            if extra.copy is not None:
                extra.host = extra.copy.block
                extra.host.owners.append(extra.name)

    def let_go(self, owner: str, hit: Hit) -> None:
        for extras in hit.extras:
            for extra in extras:
                if extra.host is not None and self.tiers is not None:
                    self.tiers.pool.release(extra.host, extra.name)
                if extra.device is not None:
                    self.pool.release(extra.device, owner)
        for entry in hit.claimed():
            self.pool.release(entry.block, owner)

    def place_reads(self, hit: Hit) -> int:
        """Room on the host for what storage is read into, grain by grain. Up to where there is room."""
        reads = [extra for extras in hit.extras for extra in extras if extra.reads_storage]
        for extra in sorted(reads, key=self.grain_at):
            assert self.tiers is not None
            group = self.groups[extra.key.group]
            extra.host = self.tiers.place(group, extra.slot % group.shape.shard_count, extra.name)
            if extra.host is None:
                return self.grain_at(extra) * self.prefix_granularity
        return hit.tokens

    def acquire_destinations(self, owner: str, hit: Hit, span: Span) -> int:
        """A block of the device for each load, in the bucket of its copy. That may leave too little for the rest in
        the full groups. Up to where there is room."""
        if not any(hit.extras):
            return hit.tokens
        for group, extras in zip(self.groups, hit.extras, strict=True):
            for extra in [extra for extra in extras if extra.resident is None]:
                assert extra.host is not None
                if group.policy.is_closed:
                    extra.device = self.pool.acquire_in(group.position, extra.host.bucket, owner)
                else:
                    extra.device = self.promises.take_in(owner, group, extra.host.bucket)
                if extra.device is None:
                    return self.grain_at(extra) * self.prefix_granularity
        demand = [
            self.end_slot(group, span) - group.policy.num_hit_slots(hit.tokens) if group.policy.is_closed else 0
            for group in self.groups
        ]
        victims = plan_evictions(self.pool, self.groups, demand)
        if victims is None:
            return hit.device_tokens
        for victim in victims:
            self.evict(victim)
        return hit.tokens

    def take_over(
        self, group: Group, table: Table, hit: Hit, grains_read: Collection[int], uses: PromptUses | None
    ) -> None:
        """Appends what comes from below. A load can be hit at once, since later plans come after it, but a grain of
        which one group is read from storage only when the read is done."""
        extras = hit.extras[group.position]
        if extras:
            table.slots += [None] * (extras[0].slot - len(table.slots))
        for extra in extras:
            grain = self.grain_at(extra)
            use = Use() if uses is None else uses.at(grain)
            if extra.resident is not None:
                extra.resident.refresh(self.last_epoch, extra.resident.boundary, use)
                extra.resident.was_hit = True
                table.slots.append(extra.resident.block)
                continue
            assert extra.device is not None
            assert extra.host is not None
            assert self.tiers is not None
            table.slots.append(extra.device)
            if grain not in grains_read:
                group.enter_key(extra.key, extra.device, self.last_epoch, Boundary.CHUNK, use)
            if extra.copy is not None:
                extra.copy.refresh(self.last_epoch, extra.copy.boundary, HIT)
                extra.copy.was_hit = True
            end_token = (extra.slot + 1) * group.shape.block_granularity
            if extra.reads_storage:
                extra.host.content = content_of(group, extra.key.prefix, end_token)
            extra.device.content = dict(extra.host.content)
            extra.device.owners.append(extra.name)
            self.tiers.wanted_loads.append(
                Transfer(
                    extra.name,
                    extra.key,
                    extra.device,
                    extra.host,
                    self.last_epoch,
                    end_token,
                    reads_storage=extra.reads_storage,
                    is_published_later=grain in grains_read,
                )
            )

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
        found = [entry for entries in hit.entries for entry in entries if entry is not None]
        return [[entry for entry in found if self.grain_of(entry) == grain] for grain in range(num_grains)]

    def claim(self, owner: str, entries: list[Entry | None], uses: PromptUses | None) -> Table:
        table = Table(owner)
        for entry in entries:
            if entry is not None:
                entry.refresh(self.last_epoch, entry.boundary, Use() if uses is None else uses.at(self.grain_of(entry)))
                entry.was_hit = True
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

    def secure(self, tables: list[Table], num_computed_tokens: int, num_tokens: int) -> list[list[int]] | None:
        """Room for as many tokens in the full groups. None, with nothing changed, if it cannot be had, else the ids of
        fresh blocks by group."""
        demand = [
            to_secure + self.num_detaching(group, table, num_computed_tokens)
            for group, table, to_secure in zip(
                self.groups, tables, self.demand_to_secure(tables, num_tokens), strict=True
            )
        ]
        victims = plan_evictions(self.pool, self.groups, demand)
        if victims is None:
            return None
        for victim in victims:
            self.evict(victim)
        ends = [group.policy.blocks_for(num_tokens) if group.policy.is_closed else 0 for group in self.groups]
        return [self.fill(*parts) for parts in zip(self.groups, tables, [0] * len(ends), ends, strict=True)]

    def num_detaching(self, group: Group, table: Table, num_computed_tokens: int) -> int:
        """Blocks that expire while a transfer holds them: each needs another one in its place."""
        expiring = table.slots[: group.policy.num_expired_slots(num_computed_tokens)]
        return sum(block is not None and is_held_behind(table, block) for block in expiring)

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
        one too many, so there it stays in its slot, as does one that a load holds and nobody else would."""
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
        if self.tiers is not None and publication.stored.covers(group.policy):
            self.tiers.queue_store(group.key_of(publication.prefixes, slot))
        if entry is None:
            group.enter(publication.prefixes, slot, own, publication.epoch, boundary, use)
            return
        entry.refresh(publication.epoch, boundary, use)
        is_one_too_many = publication.keeps_duplicates or is_held_behind(table, own)
        if entry.block is own or (is_one_too_many and not group.policy.is_closed):
            return
        entry.block.owners.append(table.owner)
        table.slots[slot] = entry.block
        if publication.keeps_duplicates:
            table.duplicates.append(own)
        else:
            self.pool.release(own, table.owner)

    def keys_of_snapshot(self, prefixes: list[Prefix]) -> list[Key]:
        """What a request that ends here would want to find: full groups whole, of states the newest ones that all such
        groups have, of windows what continuing there reads, and what continuing from the end reads."""
        states = [group for group in self.groups if isinstance(group.policy, State)]
        num_state_grains = len(prefixes)
        while num_state_grains and not all(
            group.find(prefixes, num_state_grains * group.slots_per_grain - 1) for group in states
        ):
            num_state_grains -= 1
        keys = []
        for group in sorted(self.groups, key=lambda group: not group.policy.is_closed):
            ends = [len(prefixes)] if group.policy.is_closed else [num_state_grains]
            if isinstance(group.policy, SlidingWindow) and num_state_grains != len(prefixes):
                ends.append(len(prefixes))
            for end in ends:
                slots = group.policy.slots_behind(end * group.slots_per_grain)
                keys += [group.key_of(prefixes, slot) for slot in slots]
        return keys

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
        if self.tiers is not None:
            self.tiers.queued = []
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


def is_held_behind(table: Table, block: Block) -> bool:
    """Whether transfers, and perhaps the index, would be all that holds it without this table."""
    owners = [owner for owner in block.owners if owner != INDEX and not is_transfer(owner)]
    return any(map(is_transfer, block.owners)) and owners == [table.owner]
