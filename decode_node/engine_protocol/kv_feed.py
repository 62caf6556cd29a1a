"""What a node tells subscribers about the prefixes in its cache, with their tokens: numbered batches of events.

Pure bookkeeping, without I/O and clock. It knows no subscriber: each of them keeps a number and asks what came behind
it. However slow they are, they cost no memory, because who asks for more than is remembered gets the whole state; but
that is kept as it was until they have heard all of it. Lives on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from scheduler_core import PrefixCleared, PrefixEvent, PrefixRemoved, PrefixStored

# What keeps a message well below the size that gRPC clients accept by default, and the event loop free between two.
_MAX_BATCH_TOKENS: Final = 16_384
_MAX_REMEMBERED_TOKENS: Final = 4_194_304
# Numbers of a process begin at a multiple of this, so that a state has room for its parts below them.
SEQUENCE_STEP: Final = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPart:
    """Which part of the whole state a batch is."""

    index: int
    num_parts: int
    num_grains: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvBatch:
    """Events with one number, to be applied in order. With `part` they are the state itself, which voids all before."""

    sequence: int
    unix_s: float
    events: tuple[PrefixEvent, ...]
    part: SnapshotPart | None = None


class KvFeed:
    """The cached prefixes of one process, and how they changed of late."""

    def __init__(self, *, first_sequence: int, max_remembered_tokens: int = _MAX_REMEMBERED_TOKENS) -> None:
        """`first_sequence` is the number of the empty state: at least SEQUENCE_STEP, and unlike that of any process
        before at this address, so that no number of one is taken for a number of the other.
        """
        if first_sequence < SEQUENCE_STEP:
            raise ValueError(f"first_sequence: {first_sequence} given, at least {SEQUENCE_STEP} required")
        self._sequence = first_sequence
        self._max_remembered_tokens = max_remembered_tokens
        self._grains: dict[int, PrefixStored] = {}
        # The last batches, newest last.
        self._log: deque[KvBatch] = deque()
        self._num_remembered_tokens = 0
        self._changed_unix_s = 0.0
        # Of parts of states that others followed: whoever has one of them lacks what other batches of that number name.
        self._part_numbers: frozenset[int] = frozenset()

    @property
    def sequence(self) -> int:
        """Number of the newest batch."""
        return self._sequence

    @property
    def num_grains(self) -> int:
        return len(self._grains)

    def apply(self, events: Sequence[PrefixEvent], *, unix_s: float) -> None:
        """Changes, in order. `unix_s`: when they happened."""
        self._changed_unix_s = unix_s
        for event in events:
            match event:
                case PrefixStored():
                    self._grains[event.hash] = event
                case PrefixRemoved():
                    self._grains.pop(event.hash, None)
                case PrefixCleared():
                    self._grains.clear()
        for part in _parts(events):
            self._sequence += 1
            self._log.append(KvBatch(sequence=self._sequence, unix_s=unix_s, events=part))
            self._num_remembered_tokens += _cost_tokens(part)
        while self._num_remembered_tokens > self._max_remembered_tokens:
            self._num_remembered_tokens -= _cost_tokens(self._log.popleft().events)

    def batches_since(self, sequence: int) -> Iterator[KvBatch]:
        """What a subscriber lacks that has everything up to `sequence`, 0 for nothing; all as it is at this moment.

        A batch may be made when it is asked for: whoever lets others run in between holds nobody up.
        """
        num_behind = self._sequence - sequence
        if 0 <= num_behind <= len(self._log):
            return reversed(tuple(islice(reversed(self._log), num_behind)))
        return self._snapshot()

    def batches_resumed_from(self, sequence: int) -> Iterator[KvBatch]:
        """What a subscriber lacks that comes back and says that this was the last number it heard: maybe that of a part
        of a state whose rest it never got.
        """
        return self._snapshot() if sequence in self._part_numbers else self.batches_since(sequence)

    def _snapshot(self) -> Iterator[KvBatch]:
        """The last part has the number of the state, those before it the numbers before."""
        grains = dict(self._grains)
        grains_per_part = _grains_per_part(grains)
        num_parts = max(1, -(-len(grains) // grains_per_part))
        first = self._sequence - num_parts + 1
        oldest = self._sequence - len(self._log)
        numbers = self._part_numbers.union(range(first, self._sequence))
        self._part_numbers = frozenset(number for number in numbers if number >= oldest)
        return _state_in_parts(grains, grains_per_part, range(first, first + num_parts), self._changed_unix_s)


def _state_in_parts(
    grains: dict[int, PrefixStored], grains_per_part: int, numbers: range, unix_s: float
) -> Iterator[KvBatch]:
    ordered = _parents_first(grains)
    for index, number in enumerate(numbers):
        yield KvBatch(
            sequence=number,
            unix_s=unix_s,
            events=tuple(islice(ordered, grains_per_part)),
            part=SnapshotPart(index=index, num_parts=len(numbers), num_grains=len(grains)),
        )


def _grains_per_part(grains: dict[int, PrefixStored]) -> int:
    """All grains of a process have the same number of tokens."""
    cost = max((_cost_tokens((grain,)) for grain in islice(grains.values(), 1)), default=1)
    return max(1, _MAX_BATCH_TOKENS // cost)


def _parents_first(grains: dict[int, PrefixStored]) -> Iterator[PrefixStored]:
    """A grain may have been stored anew behind those that continue it."""
    told: set[int] = set()
    for grain in grains.values():
        line: list[PrefixStored] = []
        step: PrefixStored | None = grain
        while step is not None and step.hash not in told:
            told.add(step.hash)
            line.append(step)
            step = None if step.parent_hash is None else grains.get(step.parent_hash)
        yield from reversed(line)


def _parts(events: Sequence[PrefixEvent]) -> Iterator[tuple[PrefixEvent, ...]]:
    part: list[PrefixEvent] = []
    num_tokens = 0
    for event in events:
        cost = _cost_tokens((event,))
        if part and num_tokens + cost > _MAX_BATCH_TOKENS:
            yield tuple(part)
            part, num_tokens = [], 0
        part.append(event)
        num_tokens += cost
    if part:
        yield tuple(part)


def _cost_tokens(events: Sequence[PrefixEvent]) -> int:
    """What events take, counted in tokens: a hash weighs about as much as a few of them."""
    return sum(4 + (event.prefix_granularity if isinstance(event, PrefixStored) else 0) for event in events)
