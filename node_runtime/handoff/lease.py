"""The two ends of a lease: until when a writer may post, and until when a receiver must expect what it posted.

Both count the same time from the same message, the writer from its sending and the receiver from its arrival. So the
receiver's end is never the earlier one, whatever the network did and whatever the two clocks show; all that is asked of
them is that they run at the same speed. Moments are monotonic seconds of the side's own clock and are passed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from node_runtime.errors import InvalidRequest
from node_runtime.handoff.messages import MAX_LEASE_MS, MIN_LEASE_MS

# What a decode node grants unless its configuration says otherwise: long enough for a node whose event loop is late,
# short enough that the blocks of a silent peer are not missed.
DEFAULT_LEASE_S = 4.0
# How long a prompt may be ready without a grant unless the configuration says otherwise: it keeps its memory, and its
# place among the bounded number of such prompts, from the requests of other decode nodes.
DEFAULT_GRANT_BOUND_S = 120.0
MIN_LEASE_S = MIN_LEASE_MS / 1000
MAX_LEASE_S = MAX_LEASE_MS / 1000
# So many Beats are sent per lease: three may be late or lost before it lapses.
BEATS_PER_LEASE = 4
# The last part of a lease is left to what was posted before: nothing new is posted in it.
_COMPLETION_SHARE = 0.1


def beat_interval_ms(lease_ms: int) -> int:
    """How often a writer sends a Beat under a lease of that length."""
    return lease_ms // BEATS_PER_LEASE


@dataclass(slots=True)
class WriterLease:
    """The prefill node's end. Beats are numbered from 1; 0 is Ready."""

    lease_s: float
    begun_at_s: float
    last_beat: int = 0
    next_beat_at_s: float = 0.0
    # The moment from which the lease counts, None before the grant.
    _basis_s: float | None = None
    _basis_beat: int = -1
    _sent: deque[tuple[int, float]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._sent.append((0, self.begun_at_s))
        self.next_beat_at_s = self.begun_at_s + self._interval_s

    @property
    def _interval_s(self) -> float:
        return self.lease_s / BEATS_PER_LEASE

    @property
    def end_s(self) -> float | None:
        """When it is over, None before the grant."""
        return None if self._basis_s is None else self._basis_s + self.lease_s

    @property
    def post_until_s(self) -> float | None:
        """Until when a write may still be posted, None before the grant."""
        return None if self._basis_s is None else self._basis_s + self.lease_s * (1.0 - _COMPLETION_SHARE)

    def beat(self, now_s: float) -> int:
        """Notes the sending of the next Beat; returns its number."""
        self.last_beat += 1
        self.next_beat_at_s = now_s + self._interval_s
        self._sent.append((self.last_beat, now_s))
        # What is older than a lease can be the basis of none that still runs.
        while len(self._sent) > 1 and self._sent[0][1] + self.lease_s <= now_s:
            self._sent.popleft()
        return self.last_beat

    def check(self, beat: int) -> None:
        """Raises InvalidRequest for a Beat that was never sent."""
        if beat > self.last_beat:
            raise InvalidRequest(f"beat: {beat} given, at most {self.last_beat} were sent")

    def extend(self, beat: int, now_s: float) -> bool:
        """Has the lease count from the sending of that Beat. False, and nothing changes, when that gains nothing."""
        if beat <= self._basis_beat:
            return False
        for number, sent_at_s in self._sent:
            if number == beat and sent_at_s + self.lease_s > now_s:
                self._basis_s, self._basis_beat = sent_at_s, beat
                return True
        return False


@dataclass(slots=True)
class ReceiverLease:
    """The decode node's end: counts from when the newest Beat, or Ready, was received."""

    lease_s: float
    heard_at_s: float
    last_beat: int = 0

    @property
    def end_s(self) -> float:
        """When the peer has been silent for the length of a lease; once granted, when it has stopped for good."""
        return self.heard_at_s + self.lease_s

    def hear(self, beat: int, now_s: float) -> bool:
        """Takes a Beat. False, and nothing changes, when it is no newer than the last one."""
        if beat <= self.last_beat:
            return False
        self.last_beat, self.heard_at_s = beat, now_s
        return True
