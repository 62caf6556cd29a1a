"""A cache group and what it has published: a plain list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reference_model.group_policies import Boundary, GroupPolicy
from reference_model.pool import Block
from reference_model.values import GroupShape

INDEX = "index"


@dataclass(frozen=True, slots=True)
class Prefix:
    """The identity of a grain: everything up to its end, and the extra keys. Stands for a digest."""

    extra_keys: tuple[bytes, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """The identity of a block: of a grain the one at `offset`, in the group at that position."""

    group: int
    prefix: Prefix
    offset: int


@dataclass(frozen=True, slots=True)
class Use:
    """What the eviction policy notes about a block; under LRU nothing. Smaller `value`s go first."""

    value: int = 0
    num_uses: int = 0
    leaves_ghost: bool = False

    def raised_to(self, other: Use) -> Use:
        return Use(
            max(self.value, other.value),
            max(self.num_uses, other.num_uses),
            self.leaves_ghost or other.leaves_ghost,
        )


@dataclass(slots=True, eq=False)
class Entry:
    """A published block. `epoch`: number of the admission that last hit or published it."""

    prefix: Prefix
    offset: int
    block: Block
    end_token: int
    epoch: int
    boundary: Boundary
    use: Use
    was_hit: bool = False

    def refresh(self, epoch: int, boundary: Boundary, use: Use) -> None:
        """Nothing it has ever falls."""
        self.epoch = max(self.epoch, epoch)
        self.boundary = max(self.boundary, boundary)
        self.use = self.use.raised_to(use)


class Group:
    def __init__(self, position: int, shape: GroupShape, policy: GroupPolicy, prefix_granularity: int) -> None:
        self.position = position
        self.shape = shape
        self.policy = policy
        self.slots_per_grain = prefix_granularity // shape.block_granularity
        self.entries: list[Entry] = []

    def find(self, prefixes: Sequence[Prefix], slot: int) -> Entry | None:
        """One prefix stands for several blocks, told apart by their offset in the grain."""
        key = self.key_of(prefixes, slot)
        return self.find_key(key.prefix, key.offset)

    def key_of(self, prefixes: Sequence[Prefix], slot: int) -> Key:
        grain, offset = divmod(slot, self.slots_per_grain)
        return Key(self.position, prefixes[grain], offset)

    def find_key(self, prefix: Prefix, offset: int) -> Entry | None:
        for entry in self.entries:
            if entry.offset == offset and entry.prefix == prefix:
                return entry
        return None

    def enter(
        self, prefixes: Sequence[Prefix], slot: int, block: Block, epoch: int, boundary: Boundary, use: Use
    ) -> None:
        self.enter_key(self.key_of(prefixes, slot), block, epoch, boundary, use)

    def enter_key(self, key: Key, block: Block, epoch: int, boundary: Boundary, use: Use) -> None:
        num_later_slots = self.slots_per_grain - 1 - key.offset
        end_token = len(key.prefix.tokens) - num_later_slots * self.shape.block_granularity
        self.entries.append(Entry(key.prefix, key.offset, block, end_token, epoch, boundary, use))
        block.owners.append(INDEX)

    def evictable(self) -> list[Entry]:
        """Only a block that nobody but the index holds may go."""
        return [entry for entry in self.entries if entry.block.owners == [INDEX]]

    def rank(self, entry: Entry) -> tuple[int, ...]:
        """The smallest goes first: by value, which is for the eviction policy to say; then least recently used; within
        an epoch by tier and position, which the group's kind decides."""
        place = self.policy.eviction_place(entry.boundary, entry.was_hit, entry.end_token)
        return entry.use.value, entry.epoch, *place, self.position, entry.block.block_id
