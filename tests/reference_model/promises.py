"""Blocks that are kept for requests that hold fewer than they were promised.

Groups whose blocks expire promise each request the most it can hold at one time, and always

    blocks in tables, a shared one once, + blocks kept = sum of the promises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from reference_model.evictions import Victim, plan_evictions
from reference_model.groups import INDEX, Entry, Group
from reference_model.pool import Block, Pool, Table, is_transfer

KEPT = "kept"


def is_held(block: Block) -> bool:
    """By somebody else than the cache and transfers: what those hold comes back to the pool, not to a table."""
    return any(owner != INDEX and not is_transfer(owner) for owner in block.owners)


class Promises:
    """`promised`: by owner of the tables and by group. `kept`: by group, the longest kept first."""

    def __init__(self, pool: Pool, groups: Sequence[Group], evict: Callable[[Victim], None]) -> None:
        self.pool = pool
        self.groups = groups
        self.evict = evict
        self.promised: dict[str, list[int]] = {}
        self.kept: list[list[Block]] = [[] for _ in groups]

    def num_promised(self, group: Group) -> int:
        return sum(numbers[group.position] for numbers in self.promised.values())

    def num_missing_without(self, group: Group, num_more: int, gone: Collection[str]) -> int:
        """The same if these owners and their promises were gone."""
        left = [
            block
            for block in self.pool.of_group(group.position)
            if is_held(block) and not set(block.owners) <= {INDEX, *gone}
        ]
        numbers = [numbers[group.position] for owner, numbers in self.promised.items() if owner not in gone]
        return sum(numbers) + num_more - len(left)

    def num_missing(self, group: Group, num_more: int = 0, claimed: Sequence[Entry | None] = ()) -> int:
        """Blocks to acquire if `num_more` were promised and the entries claimed; negative if there are too many."""
        there = [block for block in self.pool.of_group(group.position) if is_held(block)]
        claimed_now = [entry for entry in claimed if entry is not None and entry.block not in there]
        return self.num_promised(group) + num_more - len(there) - len(claimed_now)

    def promise(self, owner: str, numbers: list[int]) -> None:
        self.promised[owner] = numbers
        self.settle()

    def lower(self, owner: str, numbers: Sequence[int]) -> None:
        self.promised[owner] = [min(pair) for pair in zip(self.promised[owner], numbers, strict=True)]
        self.settle()

    def end(self, owner: str) -> None:
        """REQUIRES: its tables are empty."""
        del self.promised[owner]
        self.settle()

    def settle(self) -> None:
        """Makes the equation true. What is too much goes back; what is missing comes from the pool, where something
        can always be evicted for it: at least the block that left a table."""
        open_groups = [group for group in self.groups if not group.policy.is_closed]
        for group in open_groups:
            while self.kept[group.position] and self.num_missing(group) < 0:
                self.give_one_back(group)
        missing = [0 if group.policy.is_closed else max(0, self.num_missing(group)) for group in self.groups]
        victims = plan_evictions(self.pool, self.groups, missing)
        assert victims is not None, "a promised block could not be taken back"
        for victim in victims:
            self.evict(victim)
        for group in open_groups:
            kept = self.kept[group.position]
            for _ in range(missing[group.position]):
                kept.append(self.pool.acquire(group.position, KEPT, beside=kept))

    def give_one_back(self, group: Group) -> None:
        """The newest of the bucket that has most."""
        kept = self.kept[group.position]
        sizes = [sum(block.bucket == bucket for block in kept) for bucket in range(group.shape.shard_count)]
        fullest = sizes.index(max(sizes))
        block = [block for block in kept if block.bucket == fullest][-1]
        kept.remove(block)
        self.pool.release(block, KEPT)

    def take_in(self, owner: str, group: Group, bucket: int) -> Block | None:
        """What a load of the owner fills, in that bucket: the longest kept; else one of the pool for another kept one.
        None if there is neither."""
        kept = self.kept[group.position]
        assert kept, f"{owner} outgrew what it was promised in {group.shape.group_id}"
        for block in kept:
            if block.bucket == bucket:
                kept.remove(block)
                block.owners = [owner]
                return block
        block = self.pool.acquire_in(group.position, bucket, owner)
        if block is not None:
            self.give_one_back(group)
        return block

    def take(self, table: Table, group: Group) -> Block:
        """For the table's next slot: the longest kept of the bucket in which the table has least."""
        kept = self.kept[group.position]
        assert kept, f"{table.owner} outgrew what it was promised in {group.shape.group_id}"
        loads = [sum(own.bucket == block.bucket for own in table.blocks()) for block in kept]
        _, _, place = min((load, block.bucket, at) for at, (load, block) in enumerate(zip(loads, kept, strict=True)))
        block = kept.pop(place)
        block.owners = [table.owner]
        return block
