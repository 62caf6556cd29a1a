"""Each id once, and not too many."""

from __future__ import annotations

import pytest

from node_runtime.errors import DuplicateRequest, QueueFull
from router_node.live_requests import LiveRequests


def test_an_id_is_live_once_at_a_time() -> None:
    live = LiveRequests(2)
    with live.holding("a"):
        with pytest.raises(DuplicateRequest, match='request_id "a"'), live.holding("a"):
            raise AssertionError("unreachable")
        assert live.num_live == 1
    with live.holding("a"):
        assert live.num_live == 1


def test_more_than_the_bound_are_refused() -> None:
    live = LiveRequests(1)
    with live.holding("a"), pytest.raises(QueueFull, match=r"max_live_requests: .* 1 requests"), live.holding("b"):
        raise AssertionError("unreachable")
