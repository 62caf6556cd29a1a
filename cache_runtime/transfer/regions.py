"""Range checks over registered memory, shared by all engines.

Knows intervals only; the engine that owns a set decides whose memory it describes and serialises changes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from .engine import MAX_ADDRESS, Region, Run

Int64Array = npt.NDArray[np.int64]


class RegionSet:
    """Disjoint memory regions, immutable: `with_region` makes a new set, so readers need no lock."""

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        """Raises `ValueError` naming both when two regions overlap."""
        self._regions = tuple(sorted(regions, key=lambda region: region.base_address))
        for left, right in zip(self._regions, self._regions[1:], strict=False):
            if left.overlaps(right):
                raise ValueError(f"region {right} overlaps region {left}")
        self._begins = np.array([region.base_address for region in self._regions], dtype=np.int64)
        self._ends = np.array([region.end_address for region in self._regions], dtype=np.int64)

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def __len__(self) -> int:
        return len(self._regions)

    def with_region(self, region: Region) -> RegionSet:
        return RegionSet((*self._regions, region))

    def covers(self, region: Region) -> bool:
        """Whether one of the regions holds all of `region`; no plane writes across two neighbours."""
        return any(own.contains(region) for own in self._regions)

    def first_outside(self, begins: Int64Array, lengths: Int64Array) -> int | None:
        """Index of the first range that no single region holds, or None. Both arrays int64[num_ranges]."""
        if not self._regions:
            return 0 if len(begins) else None
        slots = np.searchsorted(self._begins, begins, side="right") - 1
        inside = (slots >= 0) & (begins + lengths <= self._ends[np.maximum(slots, 0)])
        return None if bool(inside.all()) else int(np.argmin(inside))


def open_regions(regions: Sequence[Region]) -> RegionSet:
    """The targets of a link. Raises `ValueError` when there are none or two overlap."""
    if not regions:
        raise ValueError("regions: a link needs at least one region to write to")
    return RegionSet(regions)


def rejection(runs: Sequence[Run], sources: RegionSet, targets: RegionSet) -> str | None:
    """Why these runs must not be posted, or None when they may be.

    Checked before anything is sent: lengths are positive, every source lies in `sources`, every target in `targets`,
    and no byte is written twice.
    """
    if not runs:
        return None
    try:
        table = np.array(runs, dtype=np.int64).reshape(len(runs), 3)
    except OverflowError:
        return "a run has an address or length above 2**63"
    source, target, length = table[:, 0], table[:, 1], table[:, 2]
    return (
        _bad_number(table, runs)
        or _outside(sources.first_outside(source, length), runs, "source", "this engine's registered memory")
        or _outside(targets.first_outside(target, length), runs, "target", "the regions the link was opened for")
        or _written_twice(target, length)
    )


def _bad_number(table: Int64Array, runs: Sequence[Run]) -> str | None:
    # A sum that wraps would pass the range check below, so addresses are bounded first.
    bad = (table <= 0).any(axis=1) | (table >= MAX_ADDRESS).any(axis=1)
    return f"run {int(np.argmax(bad))} is malformed: {runs[int(np.argmax(bad))]}" if bool(bad.any()) else None


def _outside(index: int | None, runs: Sequence[Run], side: str, where: str) -> str | None:
    if index is None:
        return None
    run = runs[index]
    begin = run.source_address if side == "source" else run.target_address
    return f"run {index}: {side} [{begin:#x}, {begin + run.length_bytes:#x}) is outside {where}"


def _written_twice(target: Int64Array, length: Int64Array) -> str | None:
    order = np.argsort(target, kind="stable")
    overlaps = target[order][:-1] + length[order][:-1] > target[order][1:]
    if not bool(overlaps.any()):
        return None
    at = int(np.argmax(overlaps))
    return f"runs {int(order[at])} and {int(order[at + 1])} write the same target bytes"
