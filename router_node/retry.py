"""Whether and when a request that failed is tried again, and which nodes it had better avoid.

Sans-IO: failures, time and random numbers come in, decisions go out. Three bounds hold at once: attempts of one
request, its deadline, and retries of all requests together, so that a mesh in trouble is not buried under its own
retries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from router_node.failures import AttemptFailure, FailureKind
from router_node.placement import PENALTY_BROKEN, PENALTY_REFUSED

# One decode node with which this many prefill nodes fail is taken for the culprit.
_MAX_PREFILL_CULPRITS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounds of one request. Raises ValueError naming the field, its value and the limit."""

    max_attempts: int = 4
    # Before the second attempt, when it goes elsewhere, and when it can only go to where one has failed.
    elsewhere_backoff_s: float = 0.025
    same_backoff_s: float = 0.5
    max_backoff_s: float = 2.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts: {self.max_attempts} given, at least 1 required")
        if not 0 <= self.elsewhere_backoff_s <= self.same_backoff_s <= self.max_backoff_s:
            raise ValueError(
                f"elsewhere_backoff_s, same_backoff_s, max_backoff_s: {self.elsewhere_backoff_s}, "
                f"{self.same_backoff_s}, {self.max_backoff_s} given, rising numbers from 0 on required"
            )


class RetryBudget:
    """Retries that all requests of a router may make: `ratio` per request, and `burst` saved up at most.

    A bucket that requests fill and retries empty, so that the load which retries add stays below `ratio` of the load
    itself however long a disturbance lasts. It begins full: the burst is what the death of a node costs at once.
    """

    def __init__(self, *, ratio: float, burst: int) -> None:
        """Raises ValueError naming the field, its value and the limit."""
        if not 0 <= ratio <= 1:
            raise ValueError(f"ratio: {ratio} given, a number in [0, 1] required")
        if burst < 0:
            raise ValueError(f"burst: {burst} given, at least 0 required")
        self._ratio = ratio
        self._burst = float(burst)
        self._saved = float(burst)
        self._num_spent = 0

    @property
    def num_spent(self) -> int:
        """Retries that were made."""
        return self._num_spent

    @property
    def num_left(self) -> int:
        """Retries that could be made now."""
        return int(self._saved)

    def earn(self) -> None:
        """A new request came."""
        self._saved = min(self._burst, self._saved + self._ratio)

    def try_spend(self) -> bool:
        """Takes one retry; False, and nothing taken, when none is left."""
        if self._saved < 1:
            return False
        self._saved -= 1
        self._num_spent += 1
        return True


class RequestRetries:
    """The attempts of one request. Tell it of each failure, then ask what follows."""

    def __init__(
        self, *, policy: RetryPolicy, budget: RetryBudget, deadline_s: float, draw: Callable[[], float]
    ) -> None:
        """`deadline_s` is the request's, on the clock that `decide` is asked with; `draw` gives numbers in [0, 1)."""
        self._policy = policy
        self._budget = budget
        self._deadline_s = deadline_s
        self._draw = draw
        self._num_failures = 0
        self._num_free = 0
        self._last_kind = FailureKind.FINAL
        self._penalties: dict[str, int] = {}
        self._prefill_culprits: dict[str, set[str]] = {}
        budget.earn()

    @property
    def num_failures(self) -> int:
        """Attempts that failed and cost one: those on nodes that drained, where others were left, do not count."""
        return self._num_failures - self._num_free

    @property
    def penalties(self) -> Mapping[str, int]:
        """By address, for the nodes that failed this request."""
        return self._penalties

    def record(self, failure: AttemptFailure) -> None:
        """An attempt failed."""
        self._num_failures += 1
        self._last_kind = failure.kind
        if failure.culprit:
            self._penalise(failure.culprit, PENALTY_REFUSED if failure.kind is FailureKind.REFUSED else PENALTY_BROKEN)
        if failure.culprit != failure.decode and failure.kind is not FailureKind.DRAINING:
            culprits = self._prefill_culprits.setdefault(failure.decode, set())
            culprits.add(failure.culprit)
            if len(culprits) >= _MAX_PREFILL_CULPRITS:
                self._penalise(failure.decode, PENALTY_BROKEN)

    def decide(self, next_addresses: Collection[str], now_s: float) -> float | None:
        """Seconds to wait before the next attempt; None: there is none.

        `next_addresses` are those the request would go to now, empty when no nodes are usable. Waits double and are
        drawn from [0, limit): short ones when nodes are left that have not failed, so that a stream hardly pauses,
        else long enough for a node to come back. Leaving a node that drains for one that has not failed costs
        nothing: it happens once per node, and is no sign of a mesh in trouble.
        """
        is_elsewhere = bool(next_addresses) and not any(address in self._penalties for address in next_addresses)
        if self._last_kind is FailureKind.DRAINING and is_elsewhere and now_s < self._deadline_s:
            self._num_free += 1
            return 0.0
        if self._last_kind is FailureKind.FINAL or self.num_failures >= self._policy.max_attempts:
            return None
        if any(self._penalties.get(address) == PENALTY_REFUSED for address in next_addresses):
            return None
        policy = self._policy
        base_s = policy.elsewhere_backoff_s if is_elsewhere else policy.same_backoff_s
        delay_s = self._draw() * min(policy.max_backoff_s, base_s * 2.0 ** (self.num_failures - 1))
        if now_s + delay_s >= self._deadline_s or not self._budget.try_spend():
            return None
        return delay_s

    def _penalise(self, address: str, penalty: int) -> None:
        self._penalties[address] = max(penalty, self._penalties.get(address, 0))
