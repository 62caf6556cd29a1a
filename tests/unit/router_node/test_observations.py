"""What a router makes of reports that come late, and of its own placements."""

from __future__ import annotations

import math

import pytest

from router_node.node_load import LoadReport, NodeLoad
from router_node.observations import Observations, Work


def _report(num_requests: int, **fields: object) -> LoadReport:
    values: dict[str, object] = {"free_tokens": None, "prefill_tokens_per_s": 0.0, "decode_step_s": 0.0, **fields}
    return LoadReport(num_requests=num_requests, **values)  # type: ignore[arg-type]


def test_requests_of_other_routers_are_those_that_two_reports_count_beyond_our_own() -> None:
    load = NodeLoad(num_requests=3)
    load.take_report(_report(5))
    assert load.num_all_requests == 3
    load.take_report(_report(7))
    assert load.num_all_requests == 5
    # What this router does itself is known at once.
    load.num_requests = 10
    assert load.num_all_requests == 12
    load.take_report(_report(10))
    assert load.num_all_requests == 10


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0, 1e12])
def test_rates_that_no_node_can_have_are_not_believed(rate: float) -> None:
    load = NodeLoad()
    load.take_report(_report(10**9, prefill_tokens_per_s=rate, decode_step_s=rate))
    load.take_report(_report(10**9))
    assert (load.prefill_tokens_per_s, load.decode_step_s) == (0, 0)
    assert load.num_all_requests == 1_000_000


def test_memory_is_what_was_reported_less_what_was_placed_since() -> None:
    load = NodeLoad(memory_tokens=100)
    assert load.free_tokens(0) is None
    assert load.free_tokens(1000) == 900
    load.take_report(_report(0, free_tokens=500))
    load.memory_tokens += 200
    assert load.free_tokens(1000) == 300
    load.memory_tokens = 0
    assert load.free_tokens(1000) == 500


def test_a_share_of_the_work_fades() -> None:
    load = NodeLoad()
    load.add_share(1000, 0.0)
    assert load.share_tokens(60.0) == pytest.approx(1000 / math.e)
    load.add_share(1000, 60.0)
    assert load.share_tokens(60.0) == pytest.approx(1000 + 1000 / math.e)
    assert load.share_tokens(3600.0) < 1


def test_a_request_counts_until_it_ends_and_its_prompt_until_it_is_computed() -> None:
    seen = Observations(max_keys_per_node=10)
    works = [
        Work(address="p", prefill_tokens=700, memory_tokens=0),
        Work(address="d", prefill_tokens=0, memory_tokens=900),
    ]
    with seen.carrying(works, 0.0) as carried:
        assert (seen.load_of("p").num_requests, seen.load_of("p").prefill_tokens) == (1, 700)
        carried.end_prefill()
        carried.end_prefill()
        assert (seen.load_of("p").num_requests, seen.load_of("p").prefill_tokens) == (1, 0)
        assert seen.load_of("d").memory_tokens == 900
    for address in "pd":
        load = seen.load_of(address)
        assert (load.num_requests, load.prefill_tokens, load.memory_tokens) == (0, 0, 0)
    with pytest.raises(RuntimeError, match="boom"), seen.carrying(works, 0.0):
        raise RuntimeError("boom")
    assert seen.load_of("p").prefill_tokens == 0


def test_measured_rates_move_the_estimates() -> None:
    seen = Observations(max_keys_per_node=10)
    before = seen.rates
    for _ in range(200):
        seen.note_transfer(1000, 0.001)
        seen.note_residence(2.0)
    assert seen.rates.transfer_tokens_per_s == pytest.approx(1e6, rel=0.01)
    assert seen.rates.residence_s == pytest.approx(2.0, rel=0.01)
    seen.note_transfer(0, 1.0)
    seen.note_transfer(1, 0.0)
    assert seen.rates.transfer_tokens_per_s > before.transfer_tokens_per_s


def test_a_node_that_left_leaves_nothing_behind() -> None:
    seen = Observations(max_keys_per_node=10)
    seen.take_report("p", _report(5, prefill_tokens_per_s=9.0))
    with seen.carrying([Work(address="p", prefill_tokens=1, memory_tokens=1)], 0.0):
        seen.forget("p")
        assert seen.load_of("p").num_all_requests == 1
        assert seen.load_of("p").prefill_tokens_per_s == 0
    seen.forget("p")
    assert seen.load_of("p").last_turn == 0
