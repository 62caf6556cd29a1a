"""Parents, their children, and the tables that hold them. Knows no tokens.

A parent (LCM block) has no group until its first child binds it, then as many slots as the group packs into it, all of
that one group; it is anybody's again, and last in the line of empty ones, once its last child is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Block:
    """A taken child. `owners` names everyone who holds it; it is free when the last of them lets go."""

    group: int
    lcm_block: int
    slot: int
    block_id: int
    owners: list[str]


@dataclass(slots=True)
class Table:
    """The blocks of one request in one group, by slot; None is a hole. `tail_room`: tokens behind the last one."""

    owner: str
    slots: list[Block | None] = field(default_factory=list)
    duplicates: list[Block] = field(default_factory=list)
    tail_room: int = 0

    def block_ids(self) -> list[int]:
        return [0 if block is None else block.block_id for block in self.slots]


class Pool:
    def __init__(self, num_lcm_blocks: int, packing: list[int]) -> None:
        self.num_lcm_blocks = num_lcm_blocks
        self.packing = packing
        self.taken: list[Block] = []
        self.empty = list(range(1, num_lcm_blocks + 1))

    def children_of(self, lcm_block: int) -> list[Block]:
        return [block for block in self.taken if block.lcm_block == lcm_block]

    def bound_parents(self, group: int) -> list[int]:
        return sorted({block.lcm_block for block in self.taken if block.group == group})

    def num_free_slots(self, group: int) -> int:
        """In the parents that the group has bound."""
        num_taken = sum(block.group == group for block in self.taken)
        return len(self.bound_parents(group)) * self.packing[group] - num_taken

    def acquire(self, group: int, owner: str) -> Block:
        """Placement: the fullest parent of the group that has a free slot, of equals the lowest, and in it the lowest
        free slot; the parent that has been empty for longest only when the group has no free slot left."""
        packing = self.packing[group]
        partial = [parent for parent in self.bound_parents(group) if len(self.children_of(parent)) < packing]
        if partial:
            lcm_block = min(partial, key=lambda parent: (-len(self.children_of(parent)), parent))
        else:
            lcm_block = self.empty.pop(0)
        used = [block.slot for block in self.children_of(lcm_block)]
        slot = next(slot for slot in range(packing) if slot not in used)
        block = Block(group, lcm_block, slot, 1 + (lcm_block - 1) * packing + slot, [owner])
        self.taken.append(block)
        return block

    def release(self, block: Block, owner: str) -> None:
        block.owners.remove(owner)
        if not block.owners:
            self.taken.remove(block)
            if not self.children_of(block.lcm_block):
                self.empty.append(block.lcm_block)

    def release_front(self, table: Table, num_slots: int) -> None:
        """The slots [0, num_slots) become holes, the last of them first."""
        for slot in reversed(range(num_slots)):
            block = table.slots[slot]
            table.slots[slot] = None
            if block is not None:
                self.release(block, table.owner)

    def release_table(self, table: Table) -> None:
        """From the last slot to the first, then the duplicates that were kept."""
        self.release_front(table, len(table.slots))
        for block in table.duplicates:
            self.release(block, table.owner)
        table.slots, table.duplicates, table.tail_room = [], [], 0
