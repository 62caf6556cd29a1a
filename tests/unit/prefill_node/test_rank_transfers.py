"""What several ranks' transfers tell is told once, when it holds for all of them."""

from __future__ import annotations

import pytest

from prefill_node.outgoing import (
    BusySpan,
    TransferDrained,
    TransferFault,
    TransferLanded,
    TransferNews,
    TransferSummary,
)
from prefill_node.rank_transfers import RankTransfers


def landed(num_bytes: int, begin_s: float, end_s: float) -> TransferLanded:
    return TransferLanded(summary=TransferSummary(num_bytes=num_bytes, num_runs=1, busy=(BusySpan(begin_s, end_s),)))


def test_blocks_have_landed_when_those_of_every_rank_have() -> None:
    news: list[TransferNews] = []
    transfers = RankTransfers(3, news.append)
    transfers.hear(landed(5, 1.0, 2.0))
    transfers.hear(landed(7, 1.5, 3.0))
    assert news == []
    transfers.hear(TransferLanded(summary=TransferSummary(num_bytes=0, num_runs=0, busy=())))
    assert news == [TransferLanded(summary=TransferSummary(num_bytes=12, num_runs=2, busy=(BusySpan(1.0, 3.0),)))]


def test_the_first_fault_is_the_handoffs_and_is_told_at_once_and_once() -> None:
    news: list[TransferNews] = []
    transfers = RankTransfers(2, news.append)
    first, second = TransferFault(error=ValueError("one")), TransferFault(error=ValueError("two"))
    transfers.hear(first)
    transfers.hear(second)
    assert news == [first]


def test_a_handoff_is_quiet_when_every_rank_is() -> None:
    news: list[TransferNews] = []
    transfers = RankTransfers(2, news.append)
    transfers.hear(landed(5, 1.0, 2.0))
    transfers.hear(TransferDrained())
    assert news == []
    transfers.hear(TransferDrained())
    assert news == [TransferDrained()]


def test_a_handoff_without_transfers_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="num_transfers: 0 given, at least 1 required"):
        RankTransfers(0, lambda news: None)
