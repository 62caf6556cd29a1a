"""Where requests go."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

import pytest

from node_runtime.errors import PeerUnavailable, RequestTooLarge
from router_node.node_pool import ComputeRole, NodeFacts, NodePool, TokenLimits
from router_node.placement import PENALTY_BROKEN as BROKEN
from router_node.placement import PENALTY_REFUSED as REFUSED
from router_node.placement import NoUsableNode, Placer

PREFILL, DECODE, FUSED = ComputeRole.PREFILL, ComputeRole.DECODE, ComputeRole.FUSED


def _placer(*, prefills_locally: Collection[str] = (), **max_request_tokens: int) -> tuple[Placer, NodePool]:
    """Nodes named by role letter and number, each with the given limit."""
    roles = {"p": PREFILL, "d": DECODE, "f": FUSED}
    listed = {role: [name for name in max_request_tokens if name[0] == key] for key, role in roles.items()}
    pool = NodePool(listed, vocab_size=100)
    for name, limit in max_request_tokens.items():
        facts = NodeFacts(
            address=name,
            node_id=name,
            incarnation=1,
            role=roles[name[0]],
            model_fingerprint="m",
            vocab_size=100,
            limits=TokenLimits(context_tokens=1000, max_request_tokens=limit),
            prefills_locally=name in prefills_locally,
        )
        pool.record_answer(facts, is_serving=True)
    return Placer(pool), pool


def _addresses(placer: Placer) -> tuple[str, ...]:
    return placer.choose(prompt_tokens=10, max_tokens=10).addresses


def _choice(placer: Placer, **penalties: int) -> tuple[str, ...]:
    return placer.choose(prompt_tokens=10, max_tokens=10, penalties=penalties).addresses


def test_nodes_with_equal_load_take_turns() -> None:
    placer, _ = _placer(p1=99, p2=99, d1=99, d2=99, d3=99)
    seen = []
    for _ in range(6):
        choice = placer.choose(prompt_tokens=10, max_tokens=10)
        with placer.occupied(choice):
            seen.append(choice.addresses)
    assert seen == [("d1", "p1"), ("d2", "p2"), ("d3", "p1"), ("d1", "p2"), ("d2", "p1"), ("d3", "p2")]


def test_the_node_with_the_fewest_requests_in_flight_is_chosen_and_counts_return() -> None:
    placer, _ = _placer(p1=99, d1=99, d2=99)
    with ExitStack() as stack:
        first = placer.choose(prompt_tokens=10, max_tokens=10)
        stack.enter_context(placer.occupied(first))
        second = placer.choose(prompt_tokens=10, max_tokens=10)
        with pytest.raises(RuntimeError, match="boom"), placer.occupied(second):
            raise RuntimeError("boom")
        assert placer.num_in_flight("d1") == 1
        assert placer.num_in_flight("d2") == 0
        assert _addresses(placer) == ("d2", "p1")
    assert placer.num_in_flight("d1") == placer.num_in_flight("p1") == 0


def test_a_fused_node_is_chosen_without_a_prefill_node() -> None:
    placer, _ = _placer(f1=99)
    choice = placer.choose(prompt_tokens=10, max_tokens=10)
    assert choice.addresses == ("f1",)
    assert choice.prefill is None


def test_a_distrusted_node_is_the_last_resort() -> None:
    placer, pool = _placer(p1=99, d1=99, d2=99)
    pool.distrust(["d1", "p1"])
    for _ in range(2):
        choice = placer.choose(prompt_tokens=10, max_tokens=10)
        with placer.occupied(choice):
            assert choice.addresses == ("d2", "p1")
    pool.distrust(["d2"])
    assert _addresses(placer)[0] == "d1"


def test_only_nodes_that_can_hold_the_request_are_chosen() -> None:
    placer, _ = _placer(p1=11, p2=10, d1=19, d2=20)
    assert _addresses(placer) == ("d2", "p1")


def test_a_request_that_fits_no_node_is_refused_with_the_largest_limit() -> None:
    placer, _ = _placer(p1=99, d1=18, d2=19)
    with pytest.raises(RequestTooLarge, match=r"max_tokens: 10 with a prompt of 10 tokens exceeds 19 tokens.*node d2"):
        _addresses(placer)
    placer, _ = _placer(p1=10, d1=99)
    with pytest.raises(RequestTooLarge, match=r"exceeds 10 tokens.*prefill node p1"):
        _addresses(placer)
    placer, _ = _placer(p1=10, d1=99, f1=20)
    assert _addresses(placer) == ("f1",)


def test_without_a_usable_pair_the_lack_is_named() -> None:
    placer, pool = _placer(p1=99, d1=99)
    pool.record_failure("p1", "connection refused")
    with pytest.raises(NoUsableNode, match=r"no prefill node is usable \(p1: connection refused\)") as caught:
        _addresses(placer)
    assert isinstance(caught.value, PeerUnavailable)


def test_nodes_with_a_penalty_come_last_whatever_their_load() -> None:
    placer, pool = _placer(p1=99, p2=99, p3=99, d1=99, d2=99)
    pool.distrust(["p2"])
    busy = placer.choose(prompt_tokens=10, max_tokens=10, penalties={"d2": BROKEN, "p1": BROKEN, "p2": REFUSED})
    assert busy.addresses == ("d1", "p3")
    with placer.occupied(busy):
        assert _choice(placer, d2=BROKEN, p1=BROKEN, p2=REFUSED, p3=REFUSED) == ("d1", "p1")
        # Nothing else is left: the least bad one.
        assert _choice(placer, d1=REFUSED, d2=BROKEN)[0] == "d2"


def test_a_decode_node_that_prefills_itself_gets_a_prefill_node_while_there_is_one() -> None:
    placer, pool = _placer(prefills_locally=["d1"], p1=99, d1=99)
    assert _addresses(placer) == ("d1", "p1")
    pool.record_failure("p1", "gone")
    assert pool.is_ready
    assert _addresses(placer) == ("d1",)


def test_without_a_prefill_node_only_those_that_need_none_are_chosen() -> None:
    placer, pool = _placer(prefills_locally=["d2"], p1=99, d1=99, d2=99)
    pool.record_failure("p1", "gone")
    for _ in range(2):
        choice = placer.choose(prompt_tokens=10, max_tokens=10)
        with placer.occupied(choice):
            assert choice.addresses == ("d2",)
    pool.record_failure("d2", "gone")
    assert not pool.is_ready
    with pytest.raises(NoUsableNode, match="no prefill node is usable"):
        _addresses(placer)


def test_a_prompt_that_fits_no_prefill_node_is_computed_where_it_fits() -> None:
    placer, _ = _placer(prefills_locally=["d2"], p1=10, d1=99, d2=99)
    assert _addresses(placer) == ("d2",)


def test_prefilling_locally_beats_a_prefill_node_that_broke_but_spares_streams_from_a_refused_load() -> None:
    placer, _ = _placer(prefills_locally=["d2"], p1=99, p2=99, d1=99, d2=99)
    assert _choice(placer, p1=BROKEN) == ("d1", "p2")
    assert _choice(placer, p1=BROKEN, p2=BROKEN) == ("d2",)
    assert "p1" in _choice(placer, p1=REFUSED, p2=REFUSED)
    placer, _ = _placer(prefills_locally=["d1"], p1=99, d1=99, f1=99)
    # A fused node is made for it.
    assert _choice(placer, p1=BROKEN) == ("f1",)
