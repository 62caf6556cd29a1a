"""What the two eviction policies note about blocks. The order that comes of it is in `Group.rank`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reference_model.groups import Entry, Prefix, Use

MAX_USES = 7
VALUE_PER_USE = 2
GHOST_STRIDE_GRAINS = 16


@dataclass(frozen=True, slots=True)
class PromptUses:
    """What the grains of one prompt are worth, fixed when it is admitted. `num_uses`: of the grains that it could have
    hit. Content behind them, its completion, was never used."""

    level: int
    num_uses: tuple[int, ...]

    def at(self, grain: int) -> Use:
        num_uses = self.num_uses[grain] if grain < len(self.num_uses) else 0
        is_end_of_prompt = grain == len(self.num_uses) - 1
        return Use(self.level + 1 + VALUE_PER_USE * num_uses, num_uses, is_end_of_prompt)


class LeastRecentlyUsed:
    """Notes nothing: the epochs say it all."""

    def uses_for(self, prefixes: Sequence[Prefix], hits: Sequence[Sequence[Entry]]) -> PromptUses | None:
        return None

    def note_evicted(self, entry: Entry, grain: int, *, ends_grain: bool) -> None:
        pass

    def note_published(self, prefix: Prefix) -> None:
        pass

    def note_cleared(self) -> None:
        pass

    def describe(self) -> list[str]:
        return []


@dataclass(slots=True)
class Ghost:
    prefix: Prefix
    num_uses: int
    is_gone: bool = False


class AgedFrequency(LeastRecentlyUsed):
    """Least frequently used. `level`, the largest value of any victim so far, stands in for time. Of evicted grains
    some are remembered as ghosts, oldest first; one that is gone keeps its place in the line."""

    def __init__(self, max_ghosts: int) -> None:
        self.max_ghosts = max_ghosts
        self.level = 0
        self.ghosts: list[Ghost] = []

    def uses_for(self, prefixes: Sequence[Prefix], hits: Sequence[Sequence[Entry]]) -> PromptUses:
        """Each grain has one use more than the most used among itself and all behind it, of those that are hit
        (`hits`: the entries of each such grain) or have a ghost."""
        known = [max((entry.use.num_uses for entry in entries), default=0) for entries in hits]
        found = [self.find(prefix) for prefix in prefixes[len(hits) :]]
        counts = known + [-1 if ghost is None else ghost.num_uses for ghost in found]
        return PromptUses(self.level, tuple(min(MAX_USES, 1 + max(counts[grain:])) for grain in range(len(counts))))

    def find(self, prefix: Prefix) -> Ghost | None:
        return next((ghost for ghost in self.ghosts if ghost.prefix == prefix and not ghost.is_gone), None)

    def note_evicted(self, entry: Entry, grain: int, *, ends_grain: bool) -> None:
        self.level = max(self.level, entry.use.value)
        is_milestone = grain % GHOST_STRIDE_GRAINS == GHOST_STRIDE_GRAINS - 1
        if not ends_grain or not (entry.use.leaves_ghost or is_milestone):
            return
        ghost = self.find(entry.prefix)
        if ghost is None:
            self.ghosts.append(Ghost(entry.prefix, entry.use.num_uses))
            self.ghosts = self.ghosts[-self.max_ghosts :] if self.max_ghosts else []
        else:
            ghost.num_uses = max(ghost.num_uses, entry.use.num_uses)

    def note_published(self, prefix: Prefix) -> None:
        for ghost in self.ghosts:
            ghost.is_gone |= ghost.prefix == prefix

    def note_cleared(self) -> None:
        """The level stays: values only ever grow."""
        self.ghosts = []

    def describe(self) -> list[str]:
        num_ghosts = sum(not ghost.is_gone for ghost in self.ghosts)
        return [f"eviction aged_frequency level={self.level} ghosts={num_ghosts}"]
