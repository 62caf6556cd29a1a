"""Finds stop strings in a stream of text, whatever the pieces it arrives in.

The stop string that is complete first wins; of several that end with the same character, the longest. Text that may be
the beginning of a stop string is held back, so that no part of a stop string is ever shown. Belongs to one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopScan:
    """`text` may be shown; `matched` is the stop string that ends the generation, if one was found."""

    text: str
    matched: str | None


class StopStringMatcher:
    """Runs one prefix automaton per stop string: constant work per character and stop string.

    Source: Knuth, Morris, Pratt, Fast pattern matching in strings, SIAM J. Comput. 6(2), 1977.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would match everywhere."""
        if any(stop == "" for stop in stops):
            raise ValueError("stop: a stop string must not be empty")
        # Longest first, so that the first automaton found complete is the one that began earliest.
        self._automata = tuple(_PrefixAutomaton(stop) for stop in sorted(set(stops), key=len, reverse=True))
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Scans the next piece. Nothing may be pushed after a match."""
        if not self._automata:
            return StopScan(text=text, matched=None)
        seen = self._held + text
        for index, character in enumerate(text):
            for automaton in self._automata:
                automaton.step(character)
            matched = next((automaton.pattern for automaton in self._automata if automaton.is_complete), None)
            if matched is not None:
                end = len(self._held) + index + 1
                return StopScan(text=seen[: end - len(matched)], matched=matched)
        num_held = max(automaton.num_matched for automaton in self._automata)
        num_shown = len(seen) - num_held
        self._held = seen[num_shown:]
        return StopScan(text=seen[:num_shown], matched=None)

    def finish(self) -> str:
        """The text still held back: the stream ended before it became a stop string."""
        held, self._held = self._held, ""
        return held


class _PrefixAutomaton:
    """How much of one pattern the text seen so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        self._fallbacks = _border_lengths(pattern)

    @property
    def is_complete(self) -> bool:
        return self.num_matched == len(self.pattern)

    def step(self, character: str) -> None:
        while self.num_matched > 0 and self.pattern[self.num_matched] != character:
            self.num_matched = self._fallbacks[self.num_matched - 1]
        if self.pattern[self.num_matched] == character:
            self.num_matched += 1


def _border_lengths(pattern: str) -> tuple[int, ...]:
    """Entry i: length of the longest proper prefix of pattern[: i + 1] that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length > 0 and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return tuple(borders)
