"""Parents, their children, and the tables that hold them. Knows no tokens.

A parent (LCM block) has no group until its first child binds it, then as many slots as the group packs into it, all of
that one group; it is anybody's again, and last in the line of empty ones, once its last child is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

TRANSFER = "transfer "


def transfer_name(number: int) -> str:
    return f"{TRANSFER}{number}"


def is_transfer(owner: str) -> bool:
    return owner.startswith(TRANSFER)


@dataclass(slots=True, eq=False)
class Block:
    """A taken child. `owners` names everyone who holds it; it is free when the last of them lets go. `bucket`: which
    of the owners of a sharded group stores it. `content`: what was written since it was taken, see `contents.py`."""

    group: int
    lcm_block: int
    slot: int
    block_id: int
    bucket: int
    owners: list[str]
    content: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Table:
    """The blocks of one request in one group, by slot; None is a hole."""

    owner: str
    slots: list[Block | None] = field(default_factory=list)
    duplicates: list[Block] = field(default_factory=list)

    def blocks(self) -> list[Block]:
        return [block for block in self.slots if block is not None]

    def block_ids(self) -> list[int]:
        return [0 if block is None else block.block_id for block in self.slots]


class Pool:
    def __init__(self, num_lcm_blocks: int, packing: Sequence[int], shard_counts: Sequence[int]) -> None:
        self.num_lcm_blocks = num_lcm_blocks
        self.packing = packing
        self.shard_counts = shard_counts
        self.taken: list[Block] = []
        self.empty = list(range(1, num_lcm_blocks + 1))

    def of_group(self, group: int) -> list[Block]:
        return [block for block in self.taken if block.group == group]

    def children_of(self, lcm_block: int) -> list[Block]:
        return [block for block in self.taken if block.lcm_block == lcm_block]

    def children(self) -> dict[int, list[Block]]:
        """Of every parent, the empty ones included."""
        children: dict[int, list[Block]] = {lcm_block: [] for lcm_block in range(1, self.num_lcm_blocks + 1)}
        for block in self.taken:
            children[block.lcm_block].append(block)
        return children

    def used_slots(self, group: int) -> dict[int, list[int]]:
        """Of the parents that the group has bound."""
        used: dict[int, list[int]] = {}
        for block in self.of_group(group):
            used.setdefault(block.lcm_block, []).append(block.slot)
        return used

    def num_free_slots(self, group: int) -> int:
        """In the parents that the group has bound."""
        return sum(self.packing[group] - len(slots) for slots in self.used_slots(group).values())

    def acquire(self, group: int, owner: str, beside: Sequence[Block]) -> Block:
        """Placement, among the free slots of the parents that the group has bound: the bucket that holds least of
        `beside`, the fullest parent, the lowest slot; of equals always the lowest. The parent that has been empty for
        longest is opened only when the group has no free slot left."""
        packing, num_buckets = self.packing[group], self.shard_counts[group]
        used = self.used_slots(group)
        if all(len(slots) == packing for slots in used.values()):
            used = {self.empty.pop(0): []}
        loads = [sum(block.bucket == bucket for block in beside) for bucket in range(num_buckets)]
        _, _, _, lcm_block, slot = min(
            (loads[slot % num_buckets], slot % num_buckets, -len(slots), lcm_block, slot)
            for lcm_block, slots in used.items()
            for slot in range(packing)
            if slot not in slots
        )
        return self.take(group, lcm_block, slot, owner)

    def acquire_in(self, group: int, bucket: int, owner: str) -> Block | None:
        """Placement in one bucket: there the fullest parent that the group has bound, else a parent that is empty."""
        used = self.used_slots(group)
        slots_there = range(bucket, self.packing[group], self.shard_counts[group])
        free = [
            (-len(taken), lcm_block, slot)
            for lcm_block, taken in used.items()
            for slot in slots_there
            if slot not in taken
        ]
        if free:
            _, lcm_block, slot = min(free)
            return self.take(group, lcm_block, slot, owner)
        return self.take(group, self.empty.pop(0), bucket, owner) if self.empty else None

    def take(self, group: int, lcm_block: int, slot: int, owner: str) -> Block:
        block_id = 1 + (lcm_block - 1) * self.packing[group] + slot
        block = Block(group, lcm_block, slot, block_id, slot % self.shard_counts[group], [owner])
        self.taken.append(block)
        return block

    def release(self, block: Block, owner: str) -> None:
        block.owners.remove(owner)
        if not block.owners:
            self.taken.remove(block)
            if not self.children_of(block.lcm_block):
                self.empty.append(block.lcm_block)

    def release_front(self, table: Table, num_slots: int) -> None:
        """The slots [0, num_slots), as far as there are any, become holes, the last of them first."""
        for slot in reversed(range(min(num_slots, len(table.slots)))):
            block = table.slots[slot]
            table.slots[slot] = None
            if block is not None:
                self.release(block, table.owner)

    def release_table(self, table: Table) -> None:
        """From the last slot to the first, then the duplicates that were kept."""
        self.release_front(table, len(table.slots))
        for block in table.duplicates:
            self.release(block, table.owner)
        table.slots, table.duplicates = [], []
