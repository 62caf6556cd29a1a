"""When a request is given a second attempt beside a first one that is slow, and how often that happened.

A hedge is an attempt like any other, paid from the budget of the retries: where everything is slow nothing is gained by
asking twice, and the budget is soon empty. Sans-IO; owned by the router's event loop.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from router_node.retry import RetryBudget

# The times to first token that a percentile is taken of: the latest ones, and no percentile of fewer than these.
_NUM_KEPT: Final = 256
MIN_KNOWN: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgePolicy:
    """How long a first token may be waited for alone. Raises ValueError naming the field, its value and the limit.

    `after_s` at least, and as long as `percentile` of the latest requests waited; of the two 0 stands for none, and
    with neither nothing is hedged.
    """

    after_s: float = 0.0
    percentile: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.after_s) and self.after_s >= 0):
            raise ValueError(f"after_s: {self.after_s} given, a finite number >= 0 required")
        if not 0 <= self.percentile < 1:
            raise ValueError(f"percentile: {self.percentile} given, a number in [0, 1) required")


class Hedges:
    """All hedges of one router."""

    def __init__(self, policy: HedgePolicy, budget: RetryBudget) -> None:
        self._policy = policy
        self._budget = budget
        self._waits_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_begun = 0
        self._num_won = 0

    @property
    def num_begun(self) -> int:
        """Hedges that were made."""
        return self._num_begun

    @property
    def num_won(self) -> int:
        """Those that gave a token before the first attempt did."""
        return self._num_won

    def delay_s(self) -> float | None:
        """How long a request waits before its hedge; None: it has none."""
        policy = self._policy
        if policy.percentile and len(self._waits_s) >= MIN_KNOWN:
            rank = math.ceil(policy.percentile * len(self._waits_s)) - 1
            return max(policy.after_s, sorted(self._waits_s)[rank])
        return policy.after_s or None

    def try_begin(self) -> bool:
        """Pays for one hedge; False, and nothing paid, when the budget of the retries is empty."""
        if not self._budget.try_spend():
            return False
        self._num_begun += 1
        return True

    def note_won(self) -> None:
        """A hedge was the first to give a token."""
        self._num_won += 1

    def note_first_token(self, waited_s: float) -> None:
        """A first attempt gave its first token after this time, or had not yet when its hedge did."""
        self._waits_s.append(waited_s)
