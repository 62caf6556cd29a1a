"""The cache of all groups: probe, admit, publish. Speaks tokens and grains; knows no requests and no roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reference_model.group_policies import GroupPolicy
from reference_model.pool import Block, Pool, Table
from reference_model.values import GroupShape, SchedulerShape

INDEX = "index"


@dataclass(frozen=True, slots=True)
class Prefix:
    """The identity of a grain: everything up to its end, and the extra keys. Stands for a digest."""

    extra_keys: tuple[bytes, ...]
    tokens: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Entry:
    """A published block. `epoch`: number of the admission that last hit or published it."""

    prefix: Prefix
    offset: int
    block: Block
    epoch: int
    end_token: int


class Group:
    """A cache group with its index: a plain list."""

    def __init__(self, position: int, shape: GroupShape, policy: GroupPolicy, prefix_granularity: int) -> None:
        self.position = position
        self.shape = shape
        self.policy = policy
        self.slots_per_grain = prefix_granularity // shape.block_granularity
        self.entries: list[Entry] = []

    def find(self, prefixes: Sequence[Prefix], slot: int) -> Entry | None:
        """One prefix stands for several blocks, told apart by their offset in the grain."""
        grain, offset = divmod(slot, self.slots_per_grain)
        for entry in self.entries:
            if entry.offset == offset and entry.prefix == prefixes[grain]:
                return entry
        return None

    def evictable(self) -> list[Entry]:
        """Only a block that nobody but the index holds may go. First victim first."""
        return sorted((entry for entry in self.entries if entry.block.owners == [INDEX]), key=self.rank)

    def rank(self, entry: Entry) -> tuple[int, int, int, int, int]:
        """Least recently used; within an epoch by tier and position, which the group's kind decides."""
        tier, place = self.policy.eviction_place(entry.end_token)
        return entry.epoch, tier, place, self.position, entry.block.block_id


@dataclass(frozen=True, slots=True)
class Victim:
    group: Group
    entry: Entry


@dataclass(frozen=True, slots=True)
class Hit:
    """What every group has cached. `entries`: by group, slot by slot; None is a slot that the group does not need."""

    tokens: int
    entries: list[list[Entry | None]]


class Coordinator:
    def __init__(self, shape: SchedulerShape, policies: Sequence[GroupPolicy]) -> None:
        self.prefix_granularity = shape.prefix_granularity
        self.pool = Pool(shape.num_lcm_blocks, [group.cache_blocks_per_lcm_block for group in shape.groups])
        self.groups = [
            Group(position, group, policy, shape.prefix_granularity)
            for position, (group, policy) in enumerate(zip(shape.groups, policies, strict=True))
        ]
        self.last_epoch = 0

    def probe(self, prefixes: Sequence[Prefix]) -> Hit:
        """The longest run of grains that every group backs. Changes nothing."""
        for num_grains in reversed(range(len(prefixes) + 1)):
            entries = [self.entries_behind(group, prefixes, num_grains) for group in self.groups]
            if all(found is not None for found in entries):
                break
        return Hit(num_grains * self.prefix_granularity, [found or [] for found in entries])

    def entries_behind(self, group: Group, prefixes: Sequence[Prefix], num_grains: int) -> list[Entry | None] | None:
        """None if the group does not back that many grains."""
        end_slot = num_grains * group.slots_per_grain
        needed = group.policy.slots_behind(end_slot)
        entries = [group.find(prefixes, slot) if slot in needed else None for slot in range(end_slot)]
        return None if any(entries[slot] is None for slot in needed) else entries

    def admit(self, owner: str, hit: Hit, extent_tokens: int, reserve_tokens: int) -> list[Table] | None:
        """All groups or none: claims the hits, evicts what must go and acquires blocks for the tokens behind them.
        A successful admission takes the next epoch and stamps its hits with it; a failed one changes nothing."""
        demand = [group.policy.num_fresh_blocks(0, extent_tokens + reserve_tokens) for group in self.groups]
        victims = self.plan_evictions(demand, hit)
        if victims is None:
            return None
        self.last_epoch += 1
        tables = [self.claim(owner, entries) for entries in hit.entries]
        for victim in victims:
            self.evict(victim)
        for group, table, num_blocks in zip(self.groups, tables, demand, strict=True):
            for _ in range(num_blocks):
                table.slots.append(self.pool.acquire(group.position, owner))
            table.tail_room = num_blocks * group.shape.block_granularity - extent_tokens
        return tables

    def grow(self, tables: list[Table], extent_tokens: int, reserve_tokens: int) -> list[list[int]] | None:
        """A later admission: room for the extent, which is consumed, and a reserve behind it. Returns the ids of fresh
        blocks by group; None, with nothing changed, if it does not fit."""
        demand = [
            group.policy.num_fresh_blocks(table.tail_room, extent_tokens + reserve_tokens)
            for group, table in zip(self.groups, tables, strict=True)
        ]
        victims = self.plan_evictions(demand, Hit(0, []))
        if victims is None:
            return None
        for victim in victims:
            self.evict(victim)
        fresh_ids = []
        for group, table, num_blocks in zip(self.groups, tables, demand, strict=True):
            blocks = [self.pool.acquire(group.position, table.owner) for _ in range(num_blocks)]
            table.slots += blocks
            table.tail_room += num_blocks * group.shape.block_granularity - extent_tokens
            fresh_ids.append([block.block_id for block in blocks])
        return fresh_ids

    def claim(self, owner: str, entries: list[Entry | None]) -> Table:
        table = Table(owner)
        for entry in entries:
            if entry is None:
                table.slots.append(None)
            else:
                entry.epoch = self.last_epoch
                entry.block.owners.append(owner)
                table.slots.append(entry.block)
        return table

    def plan_evictions(self, demand: list[int], hit: Hit) -> list[Victim] | None:
        """A set of which no member can be left out, in eviction order; None if nothing that may go makes it fit.
        Victims are taken in the common order of all groups until it fits; then the set is walked backwards, and
        every block that turns out not to be needed stays. The hits of the admission itself are no candidates."""
        hits = [entry for entries in hit.entries for entry in entries]
        candidates = [Victim(group, entry) for group in self.groups for entry in group.evictable()]
        candidates = [victim for victim in candidates if victim.entry not in hits]
        candidates.sort(key=lambda victim: victim.group.rank(victim.entry))
        chosen: list[Victim] = []
        while not self.fits(demand, chosen):
            if not candidates:
                return None
            chosen.append(candidates.pop(0))
        for victim in reversed(list(chosen)):
            without = [other for other in chosen if other is not victim]
            if self.fits(demand, without):
                chosen = without
        return chosen

    def fits(self, demand: list[int], gone: list[Victim]) -> bool:
        """Whether the blocks of all groups could be acquired if the victims were gone. Free slots serve the group that
        bound their parent; what they do not cover takes whole empty parents."""
        gone_blocks = [victim.entry.block for victim in gone]
        left = [block for block in self.pool.taken if block not in gone_blocks]
        num_empty = self.pool.num_lcm_blocks - len({block.lcm_block for block in left})
        for group, num_blocks in zip(self.groups, demand, strict=True):
            own = [block for block in left if block.group == group.position]
            packing = group.shape.cache_blocks_per_lcm_block
            num_holes = len({block.lcm_block for block in own}) * packing - len(own)
            num_empty -= -(-max(0, num_blocks - num_holes) // packing)
        return num_empty >= 0

    def evict(self, victim: Victim) -> None:
        victim.group.entries.remove(victim.entry)
        self.pool.release(victim.entry.block, INDEX)

    def publish(
        self, tables: list[Table], prefixes: Sequence[Prefix], first_grain: int, epoch: int, *, keeps_duplicates: bool
    ) -> None:
        """Enters the grains from `first_grain` on. Where their content is there already, the table goes over to the
        block that has it, and its own is dropped, or kept while the table lives if a transfer may still read it."""
        for group, table in zip(self.groups, tables, strict=True):
            bounds = (first_grain * group.slots_per_grain, len(prefixes) * group.slots_per_grain)
            for slot in group.policy.slots_to_publish(*bounds):
                own = table.slots[slot]
                if own is None:
                    continue
                entry = group.find(prefixes, slot)
                if entry is None:
                    grain, offset = divmod(slot, group.slots_per_grain)
                    end_token = (slot + 1) * group.shape.block_granularity
                    group.entries.append(Entry(prefixes[grain], offset, own, epoch, end_token))
                    own.owners.append(INDEX)
                    continue
                entry.epoch = max(entry.epoch, epoch)
                if entry.block is not own:
                    entry.block.owners.append(table.owner)
                    table.slots[slot] = entry.block
                    if keeps_duplicates:
                        table.duplicates.append(own)
                    else:
                        self.pool.release(own, table.owner)

    def clear(self) -> None:
        for group in self.groups:
            for entry in group.evictable():
                self.evict(Victim(group, entry))
