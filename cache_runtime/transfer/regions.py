"""Range checks over registered memory, shared by all engines.

Knows intervals only; the engine that owns a set decides whose memory it describes and serialises changes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ._native import RunFault, check_runs
from .engine import KEY_BYTES, MAX_ADDRESS, Region, Run, Spans
from .runs import RunTable

Int64Array = npt.NDArray[np.int64]

# Up to here a look at every region beats a search, which scattered ranges make slow.
_FEW_REGIONS = 8

OVERFLOW = "a run has an address or length above 2**63"


class RegionSet:
    """Disjoint memory regions, immutable: `with_region` makes a new set, so readers need no lock."""

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        """Raises `ValueError` naming both when two regions overlap."""
        self._regions = tuple(sorted(regions, key=lambda region: region.base_address))
        for left, right in zip(self._regions, self._regions[1:], strict=False):
            if left.overlaps(right):
                raise ValueError(f"region {right} overlaps region {left}")
        rows = [(region.base_address, region.end_address) for region in self._regions]
        self.spans: Spans = np.array(rows, dtype=np.int64).reshape(len(rows), 2)

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
        ends = begins + lengths
        if len(self._regions) <= _FEW_REGIONS:
            inside = np.zeros(len(begins), dtype=np.bool_)
            for region in self._regions:
                inside |= (begins >= region.base_address) & (ends <= region.end_address)
        else:
            slots = np.searchsorted(self.spans[:, 0], begins, side="right") - 1
            inside = (slots >= 0) & (ends <= self.spans[np.maximum(slots, 0), 1])
        return None if bool(inside.all()) else int(np.argmin(inside))


def check_permit(key: bytes, spans: Spans, registered: RegionSet) -> None:
    """Raises `ValueError` when memory cannot be allowed under this key, as `TransferEngine.allow` says."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"key: {len(key)} bytes given, {KEY_BYTES} required")
    if spans.ndim != 2 or spans.shape[1] != 2 or not len(spans):
        raise ValueError(f"spans: shape {spans.shape} given, (at least 1, 2) required")
    begins, ends = spans[:, 0], spans[:, 1]
    if bool((begins <= 0).any()) or bool((begins >= ends).any()) or bool((ends > MAX_ADDRESS).any()):
        raise ValueError("spans: one of them is empty or outside of (0, 2**62]")
    index = registered.first_outside(begins, ends - begins)
    if index is not None:
        raise ValueError(f"spans: [{begins[index]:#x}, {ends[index]:#x}) is outside this engine's registered memory")


def joined(spans: Spans) -> RegionSet:
    """The memory of `spans`; those that touch or overlap are one region, for a run may cross blocks side by side."""
    regions: list[Region] = []
    for begin, end in sorted(spans.tolist()):
        if regions and begin <= regions[-1].end_address:
            begin, end = regions[-1].base_address, max(end, regions[-1].end_address)
            del regions[-1]
        regions.append(Region(base_address=begin, num_bytes=end - begin))
    return RegionSet(regions)


def open_regions(regions: Sequence[Region]) -> RegionSet:
    """The targets of a link. Raises `ValueError` when there are none or two overlap."""
    if not regions:
        raise ValueError("regions: a link needs at least one region to write to")
    return RegionSet(regions)


def rejection(runs: Sequence[Run], sources: RegionSet, targets: RegionSet) -> str | None:
    """Why these runs must not be posted, or None when they may be; see `table_rejection`."""
    try:
        return table_rejection(RunTable.of(runs), sources, targets)
    except OverflowError:
        return OVERFLOW


def table_rejection(runs: RunTable, sources: RegionSet, targets: RegionSet) -> str | None:
    """Why these runs must not be posted, or None when they may be.

    Checked before anything is sent: addresses and lengths are positive and bounded, every source lies in `sources`,
    every target in `targets`, and no byte is written twice.
    """
    fault, first, second = check_runs(runs.rows, sources.spans, targets.spans)
    match fault:
        case RunFault.NONE:
            return None
        case RunFault.MALFORMED:
            return f"run {first} is malformed: {runs[first]}"
        case RunFault.SOURCE_OUTSIDE:
            begin, length = runs[first].source_address, runs[first].length_bytes
            return f"run {first}: source [{begin:#x}, {begin + length:#x}) is outside this engine's registered memory"
        case RunFault.TARGET_OUTSIDE:
            begin, length = runs[first].target_address, runs[first].length_bytes
            end = begin + length
            return f"run {first}: target [{begin:#x}, {end:#x}) is outside the regions the link was opened for"
        case _:
            return f"runs {first} and {second} write the same target bytes"
