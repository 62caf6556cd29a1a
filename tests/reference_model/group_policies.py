"""What one kind of cache group does differently from another. Everything else is common to all groups.

Slots are absolute: slot i of a group covers tokens [i * block_granularity, (i + 1) * block_granularity) for ever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class GroupPolicy(ABC):
    def __init__(self, block_granularity: int) -> None:
        self.block_granularity = block_granularity

    @abstractmethod
    def slots_behind(self, end_slot: int) -> range:
        """The slots that must be there for a request to go on at `end_slot`."""

    @abstractmethod
    def slots_to_publish(self, first_slot: int, end_slot: int) -> range:
        """Of the slots of newly completed grains, those that are worth an entry."""

    @abstractmethod
    def eviction_place(self, end_token: int) -> tuple[int, int]:
        """(tier, position) among entries of one epoch, smallest first. `end_token`: where the block ends."""

    def num_fresh_blocks(self, tail_room: int, num_tokens: int) -> int:
        """For `num_tokens` more, extent and reserve together. The room behind the last token is used first."""
        missing = max(0, num_tokens - tail_room)
        return -(-missing // self.block_granularity)


class FullHistory(GroupPolicy):
    """Keeps every block; a hit needs every block before it (prefix-closed)."""

    def slots_behind(self, end_slot: int) -> range:
        return range(end_slot)

    def slots_to_publish(self, first_slot: int, end_slot: int) -> range:
        return range(first_slot, end_slot)

    def eviction_place(self, end_token: int) -> tuple[int, int]:
        """The last of the tiers, and the deepest first: what others depend on goes after them."""
        return 2, -end_token
