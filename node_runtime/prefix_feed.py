"""What a node tells about the prefixes in its cache: the set of their keys, and how it changed of late.

Pure bookkeeping, without I/O and clock. It knows no listener: each of them keeps a number and asks what came behind it.
However slow they are, they cost no memory, because who asks for more than is remembered gets the whole set. Lives on
the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

MAX_KEYS_PER_CHANGE: Final = 8192
# Further behind than so many the whole set is told, which is a copy, where the changes are merged key by key.
_MAX_REMEMBERED_KEYS: Final = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChange:
    """Changes with the numbers (base_sequence, sequence]; where more of them follows, `sequence` is `base_sequence`.

    `is_snapshot`: what was told before is void, and base_sequence is 0.
    """

    sequence: int
    base_sequence: int
    is_snapshot: bool
    removed: tuple[int, ...]
    stored: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.base_sequence <= self.sequence:
            raise ValueError(f"sequence: {self.sequence} given, at least base_sequence={self.base_sequence} required")
        if self.is_snapshot and self.base_sequence != 0:
            raise ValueError(f"base_sequence: {self.base_sequence} given, a snapshot begins at 0")
        num_keys = len(self.removed) + len(self.stored)
        if num_keys > MAX_KEYS_PER_CHANGE:
            raise ValueError(f"removed, stored: {num_keys} keys given, at most {MAX_KEYS_PER_CHANGE} allowed")


class PrefixFeed:
    """The keys of one process, numbered change by change from 1, which is the empty set of the beginning."""

    def __init__(self, *, max_remembered_keys: int = _MAX_REMEMBERED_KEYS) -> None:
        self._max_remembered_keys = max_remembered_keys
        self._sequence = 1
        # In the order in which they were stored.
        self._keys: dict[int, None] = {}
        # The last changes, newest last: what each of them did to which key.
        self._log: deque[dict[int, bool]] = deque()
        self._num_remembered_keys = 0

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    def apply(self, *, is_cleared: bool, removed: Sequence[int], stored: Sequence[int]) -> None:
        """One change, in this order."""
        self._sequence += 1
        if is_cleared:
            self._keys.clear()
        for key in removed:
            self._keys.pop(key, None)
        for key in stored:
            self._keys[key] = None
        if is_cleared:
            # A listener gets the set anew, which is shorter than what was removed.
            self._log.clear()
            self._num_remembered_keys = 0
            return
        change = dict.fromkeys(removed, False) | dict.fromkeys(stored, True)
        self._log.append(change)
        self._num_remembered_keys += len(change)
        while self._num_remembered_keys > self._max_remembered_keys:
            self._num_remembered_keys -= len(self._log.popleft())

    def changes_since(self, sequence: int) -> Iterator[PrefixChange]:
        """What a listener lacks that has everything up to `sequence`, 0 for nothing. All of it was so at one moment."""
        num_behind = self._sequence - sequence
        if num_behind == 0:
            return iter(())
        if sequence == 0 or not 0 < num_behind <= len(self._log):
            return self._parts(0, (), tuple(self._keys), is_snapshot=True)
        net: dict[int, bool] = {}
        for change in islice(self._log, len(self._log) - num_behind, None):
            for key, is_stored in change.items():
                # Keys that come later must stay behind those they continue.
                net.pop(key, None)
                net[key] = is_stored
        removed = tuple(key for key, is_stored in net.items() if not is_stored)
        stored = tuple(key for key, is_stored in net.items() if is_stored)
        return self._parts(sequence, removed, stored, is_snapshot=False)

    def _parts(
        self, base: int, removed: tuple[int, ...], stored: tuple[int, ...], *, is_snapshot: bool
    ) -> Iterator[PrefixChange]:
        sequence, num_removed, num_keys = self._sequence, len(removed), len(removed) + len(stored)
        ends = [*range(MAX_KEYS_PER_CHANGE, num_keys, MAX_KEYS_PER_CHANGE), num_keys]
        begin = 0
        for end in ends:
            yield PrefixChange(
                sequence=sequence if end == num_keys else base,
                base_sequence=base,
                is_snapshot=is_snapshot and begin == 0,
                removed=removed[begin:end],
                stored=stored[max(0, begin - num_removed) : max(0, end - num_removed)],
            )
            begin = end
