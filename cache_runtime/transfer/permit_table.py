"""The receiver's fence of planes whose bytes Python places: which memory may be written to right now, by key.

Knows addresses and keys; who asks, and on which thread, is the plane's business. Its native twin is `GrantTable`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from ._native import digest_spans
from .engine import Region, Run, Spans
from .regions import RegionSet, joined


class PermitTable:
    """Live permits. Every look at it, and what is placed after a look, is done inside of `lock`."""

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        """A revocation waits for the lock, which may be one that does nothing where there is one thread."""
        self._lock = lock
        self._live: dict[bytes, RegionSet] = {}

    def allow(self, key: bytes, spans: Spans) -> TablePermit:
        """Raises `ValueError` for a key that has a live permit."""
        regions = joined(spans)
        with self._lock:
            if key in self._live:
                raise ValueError("key: it has a live grant already")
            self._live[key] = regions
        return TablePermit(self, key, regions)

    def holds(self, key: bytes, run: Run) -> bool:
        """Whether the run may land. The caller holds the lock."""
        regions = self._live.get(key)
        target = Region(base_address=run.target_address, num_bytes=run.length_bytes)
        return regions is not None and regions.covers(target)

    def revoke(self, key: bytes, regions: RegionSet) -> None:
        """Ends this permit and no later one of the key."""
        with self._lock:
            if self._live.get(key) is regions:
                del self._live[key]


class TablePermit:
    """`Permit` of such a plane."""

    def __init__(self, table: PermitTable, key: bytes, regions: RegionSet) -> None:
        self._table = table
        self._key = key
        self._regions = regions

    def revoke(self) -> None:
        self._table.revoke(self._key, self._regions)

    def digests(self, blocks: Spans, kind: str) -> bytes:
        return digest_spans(blocks, kind)
