"""RankTransfers: the writes of one handoff by several tensor ranks to several, told as if they were one transfer's.

A completion holds for a handoff when it holds for all of its transfers: the blocks are there once the last rank's bytes
are, and quiet once the last rank is. One fault is the handoff's. Thread-safe; it knows no rank, no block and no engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from prefill_node.outgoing import (
    TransferDrained,
    TransferFault,
    TransferLanded,
    TransferNews,
    TransferSummary,
    merge_spans,
)


class RankTransfers:
    """Takes the news of `num_transfers` transfers through `hear`, and passes on to `notify` what holds for all."""

    def __init__(self, num_transfers: int, notify: Callable[[TransferNews], None]) -> None:
        if num_transfers < 1:
            raise ValueError(f"num_transfers: {num_transfers} given, at least 1 required")
        self._num_transfers = num_transfers
        self._notify = notify
        self._lock = threading.Lock()
        self._landed: list[TransferSummary] = []
        self._num_drained = 0
        self._has_fault = False

    def hear(self, news: TransferNews) -> None:
        """Called once per end of a transfer, on any thread."""
        with self._lock:
            joint = self._join(news)
        if joint is not None:
            self._notify(joint)

    def _join(self, news: TransferNews) -> TransferNews | None:
        match news:
            case TransferLanded():
                self._landed.append(news.summary)
                return self._all_landed() if len(self._landed) == self._num_transfers else None
            case TransferDrained():
                self._num_drained += 1
                return news if self._num_drained == self._num_transfers else None
            case TransferFault():
                is_first, self._has_fault = not self._has_fault, True
                return news if is_first else None

    def _all_landed(self) -> TransferLanded:
        return TransferLanded(
            summary=TransferSummary(
                num_bytes=sum(summary.num_bytes for summary in self._landed),
                num_runs=sum(summary.num_runs for summary in self._landed),
                busy=merge_spans([span for summary in self._landed for span in summary.busy]),
            )
        )
