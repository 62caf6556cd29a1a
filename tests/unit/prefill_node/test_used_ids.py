"""Ids of handoffs that were used are known for long, and not for ever."""

from __future__ import annotations

import pytest

from node_runtime.errors import InvalidRequest
from prefill_node.used_ids import UsedHandoffIds


def test_the_newest_ids_are_remembered_up_to_the_bound() -> None:
    used = UsedHandoffIds(capacity=3)
    ids = [bytes([number]) * 16 for number in range(5)]
    for handoff_id in ids:
        used.check(handoff_id)
        used.add(handoff_id)
    for handoff_id in ids[2:]:
        with pytest.raises(InvalidRequest, match="handoff_id: used before"):
            used.check(handoff_id)
    for handoff_id in ids[:2]:
        used.check(handoff_id)
