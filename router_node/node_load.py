"""How much the nodes have to do: what this router placed there, and what they tell about the rest.

Pure bookkeeping; times come in. What a node tells arrives late, what this router did is known at once: of a report only
the part counts that this router does not know itself. Owned by the router's event loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

# What a node cannot mean; a report is believed up to there.
_MAX_REQUESTS: Final = 1_000_000
_MAX_TOKENS_PER_S: Final = 1e9
_MAX_STEP_S: Final = 60.0
# How long work that was placed on a node counts as its share.
_SHARE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a node told. 0 stands for a rate that was not measured, None for memory that it did not tell about.

    `peers`: of the prefill nodes that a decode node knows, by address, whether the data plane was proved.
    """

    num_requests: int
    free_tokens: int | None
    prefill_tokens_per_s: float
    decode_step_s: float
    peers: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(slots=True)
class NodeLoad:
    """One node. Tokens are prompt tokens still to be computed there, and tokens that need memory there."""

    num_requests: int = 0
    prefill_tokens: int = 0
    memory_tokens: int = 0
    last_turn: int = 0
    # The node left; what is known of it goes with the last request.
    has_left: bool = False
    # Of others: requests in the last report and the one before that this router did not place.
    num_foreign_requests: int = 0
    _last_excess: int = 0
    _free_tokens: int | None = None
    _memory_tokens_at_report: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    peers: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))
    _share_tokens: float = 0.0
    _share_at_s: float = 0.0

    @property
    def num_all_requests(self) -> int:
        """This router's and the others'."""
        return self.num_requests + self.num_foreign_requests

    def take_report(self, report: LoadReport) -> None:
        """The node told how it is."""
        self.has_left = False
        excess = max(0, min(report.num_requests, _MAX_REQUESTS) - self.num_requests)
        # A report may count requests of ours that have ended since; those of others stay for longer than one.
        self.num_foreign_requests = min(excess, self._last_excess)
        self._last_excess = excess
        self._free_tokens = report.free_tokens
        self._memory_tokens_at_report = self.memory_tokens
        self.prefill_tokens_per_s = _within(report.prefill_tokens_per_s, _MAX_TOKENS_PER_S)
        self.decode_step_s = _within(report.decode_step_s, _MAX_STEP_S)
        self.peers = report.peers

    def forget_report(self) -> None:
        """The node is another process by now, or gone."""
        self.has_left = True
        self.num_foreign_requests = self._last_excess = 0
        self._free_tokens = None
        self.prefill_tokens_per_s = self.decode_step_s = 0.0
        self.peers = MappingProxyType({})

    def free_tokens(self, capacity_tokens: int) -> int | None:
        """Memory for this many tokens is left; None where that is not known. `capacity_tokens` is 0 if unknown."""
        if self._free_tokens is not None:
            return max(0, self._free_tokens - max(0, self.memory_tokens - self._memory_tokens_at_report))
        return max(0, capacity_tokens - self.memory_tokens) if capacity_tokens else None

    def add_share(self, num_tokens: int, now_s: float) -> None:
        """Prompt tokens were given to the node to compute."""
        self._share_tokens = self.share_tokens(now_s) + num_tokens
        self._share_at_s = now_s

    def share_tokens(self, now_s: float) -> float:
        """Prompt tokens that the node was given of late; older ones fade."""
        return self._share_tokens * math.exp((self._share_at_s - now_s) / _SHARE_S)


def _within(value: float, limit: float) -> float:
    """0 for what is no number in (0, limit]."""
    return value if 0 < value <= limit else 0.0
