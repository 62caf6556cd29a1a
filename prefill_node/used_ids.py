"""The handoff ids that this prefill node has seen: a Start that comes again opens nothing.

Ids are random and never used twice, so only a replay repeats one. It knows no handoffs. Lives on the event loop.
"""

from __future__ import annotations

from collections import OrderedDict

from node_runtime.errors import InvalidRequest

# A few minutes of a busy node, a few megabytes. What is replayed later still finds its request id, incarnations and
# grants checked.
_CAPACITY = 1 << 16


class UsedHandoffIds:
    """Remembers the newest ids, up to a bound."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._ids: OrderedDict[bytes, None] = OrderedDict()

    def check(self, handoff_id: bytes) -> None:
        """Raises InvalidRequest for an id that was added before."""
        if handoff_id in self._ids:
            raise InvalidRequest("handoff_id: used before; every attempt needs a fresh random one")

    def add(self, handoff_id: bytes) -> None:
        self._ids[handoff_id] = None
        if len(self._ids) > self._capacity:
            self._ids.popitem(last=False)
