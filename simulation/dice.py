"""Random numbers of a world: a source of its own for each purpose.

So that what happens between two processes hardly changes when something is left out of a scenario that concerns others.
"""

from __future__ import annotations

from random import Random


class Dice:
    """All sources of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._sources: dict[tuple[str, ...], Random] = {}

    def of(self, *purpose: str) -> Random:
        """The source for a purpose, the same at each call."""
        source = self._sources.get(purpose)
        if source is None:
            source = self._sources[purpose] = Random(f"{self._seed}/{'/'.join(purpose)}")
        return source
