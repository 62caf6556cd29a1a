"""What a router makes of prefix events, from their definition alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import scheduler_core as sc


def hash_of(parent_hash: int | None, tokens: Sequence[int]) -> int:
    """64-bit FNV-1a, written from its definition."""
    parent = b"\0" if parent_hash is None else b"\1" + struct.pack("<Q", parent_hash)
    value = 0xCBF29CE484222325
    for byte in parent + struct.pack("<Q", len(tokens)) + struct.pack(f"<{len(tokens)}i", *tokens):
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def hashes_of(tokens: Sequence[int], prefix_granularity: int = 4) -> list[int]:
    """Of the full grains of a prompt."""
    hashes: list[int] = []
    for begin in range(0, len(tokens) - prefix_granularity + 1, prefix_granularity):
        grain = tokens[begin : begin + prefix_granularity]
        hashes.append(hash_of(hashes[-1] if hashes else None, grain))
    return hashes


@dataclass(slots=True)
class Router:
    """Applies events as a router would, and refuses what makes no sense to one."""

    stored: dict[int, int | None] = field(default_factory=dict)  # parent by hash

    def drain(self, scheduler: sc.Scheduler) -> list[sc.PrefixEvent]:
        events = scheduler.drain_prefix_events()
        for event in events:
            match event:
                case sc.PrefixStored():
                    assert event.hash not in self.stored, "stored twice"
                    assert event.hash == hash_of(event.parent_hash, event.tokens.tolist())
                    self.stored[event.hash] = event.parent_hash
                case sc.PrefixRemoved():
                    del self.stored[event.hash]
                case sc.PrefixCleared():
                    self.stored.clear()
        return events
