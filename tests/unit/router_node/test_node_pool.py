"""Which nodes of the pool may be used, and what is said about the others."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from router_node.node_pool import ComputeRole, NodeFacts, NodePool, NodeState, TokenLimits

PREFILL, DECODE, FUSED = ComputeRole.PREFILL, ComputeRole.DECODE, ComputeRole.FUSED


def _facts(
    address: str,
    role: ComputeRole,
    *,
    fingerprint: str = "m1",
    vocab_size: int = 100,
    max_request_tokens: int = 64,
) -> NodeFacts:
    return NodeFacts(
        address=address,
        node_id=f"node-{address}",
        incarnation=1,
        role=role,
        model_fingerprint=fingerprint,
        vocab_size=vocab_size,
        limits=TokenLimits(context_tokens=64, max_request_tokens=max_request_tokens),
    )


def _pool() -> NodePool:
    return NodePool({PREFILL: ["p:1"], DECODE: ["d:1", "d:2"], FUSED: ["f:1"]}, vocab_size=100)


def _usable_addresses(pool: NodePool, role: ComputeRole) -> list[str]:
    return [node.facts.address for node in pool.usable(role)]


def test_a_pool_is_ready_with_a_pair_or_with_a_fused_node() -> None:
    pool = _pool()
    assert not pool.is_ready
    pool.record_answer(_facts("d:1", DECODE), is_serving=True)
    assert not pool.is_ready
    pool.record_answer(_facts("p:1", PREFILL), is_serving=True)
    assert pool.is_ready
    pool.record_failure("p:1", "connection refused")
    assert not pool.is_ready
    pool.record_answer(_facts("f:1", FUSED), is_serving=True)
    assert pool.is_ready


def test_a_node_that_drains_is_left_out_under_that_name_and_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    pool = _pool()
    for address, role in (("p:1", PREFILL), ("d:1", DECODE), ("d:2", DECODE)):
        pool.record_answer(_facts(address, role), is_serving=True)
    # One said so itself, the other one refused a request.
    pool.record_answer(_facts("d:1", DECODE), is_serving=False, is_draining=True)
    pool.record_draining("d:2")
    assert _usable_addresses(pool, DECODE) == []
    assert pool.describe_lack().count("is draining") == 2
    assert {condition.state for condition in pool.conditions() if condition.address.startswith("d")} == {
        NodeState.DRAINING
    }
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    pool.record_answer(_facts("d:2", DECODE), is_serving=True)
    assert _usable_addresses(pool, DECODE) == ["d:2"]


def test_a_pool_that_is_not_ready_says_which_nodes_it_lacks_and_why() -> None:
    pool = _pool()
    pool.record_answer(_facts("d:1", DECODE), is_serving=True)
    pool.record_failure("p:1", "connection refused")
    lack = pool.describe_lack()
    assert lack.startswith("no prefill node and no fused node is usable")
    assert "p:1: connection refused" in lack
    assert "f:1: not reached yet" in lack
    assert "d:2" not in lack
    assert NodePool({FUSED: ["f:1"]}, vocab_size=1).describe_lack().startswith("no fused node is usable")


def test_a_node_that_is_not_serving_is_not_used() -> None:
    pool = _pool()
    pool.record_answer(_facts("f:1", FUSED), is_serving=False)
    assert not pool.is_ready
    assert "is not serving" in pool.describe_lack()


def test_a_node_with_another_vocabulary_is_left_out_with_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    pool = _pool()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pool.record_answer(_facts("f:1", FUSED, vocab_size=99), is_serving=True)
    assert not pool.usable(FUSED)
    (record,) = caplog.records
    assert "vocab_size is 99, the router's tokenizer has 100" in record.getMessage()


def test_a_node_of_another_model_is_left_out_until_the_pool_changes_over() -> None:
    pool = _pool()
    pool.record_answer(_facts("d:1", DECODE), is_serving=True)
    pool.record_answer(_facts("d:2", DECODE, fingerprint="m2"), is_serving=True)
    assert _usable_addresses(pool, DECODE) == ["d:1"]
    condition = pool.conditions()[2]
    assert condition.state is NodeState.SUSPECT
    assert "model_fingerprint is m2, the pool runs m1" in condition.detail
    pool.record_failure("d:1", "gone")
    pool.record_answer(_facts("d:2", DECODE, fingerprint="m2"), is_serving=True)
    pool.record_answer(_facts("d:1", DECODE), is_serving=True)
    assert _usable_addresses(pool, DECODE) == ["d:2"]


def test_the_only_node_may_come_back_with_another_model() -> None:
    pool = _pool()
    pool.record_answer(_facts("f:1", FUSED), is_serving=True)
    pool.record_answer(_facts("f:1", FUSED, fingerprint="m2"), is_serving=True)
    assert pool.usable(FUSED)[0].facts.model_fingerprint == "m2"


def test_a_node_of_another_role_than_listed_is_left_out_but_a_fused_node_may_stand_in_for_decode() -> None:
    pool = _pool()
    pool.record_answer(_facts("p:1", DECODE), is_serving=True)
    assert not pool.usable(DECODE)
    assert "listed as prefill node, but says it is decode node" in pool.conditions()[0].detail
    pool.record_answer(_facts("d:1", FUSED), is_serving=True)
    assert _usable_addresses(pool, FUSED) == ["d:1"]


def test_a_distrusted_node_stays_usable_and_unsettles_the_pool_until_it_answers() -> None:
    pool = NodePool({FUSED: ["f:1"]}, vocab_size=100)
    assert not pool.is_settled
    facts = _facts("f:1", FUSED)
    pool.record_answer(facts, is_serving=True)
    assert pool.is_settled
    pool.distrust(["f:1"])
    assert not pool.is_settled
    assert not pool.usable(FUSED)[0].is_trusted
    assert pool.conditions()[0].state is NodeState.SUSPECT
    pool.record_answer(replace(facts, incarnation=2), is_serving=True)
    assert pool.is_settled
    assert pool.usable(FUSED)[0].facts.incarnation == 2


def test_the_limits_are_those_of_the_node_that_holds_most() -> None:
    pool = _pool()
    assert pool.limits() is None
    pool.record_answer(_facts("p:1", PREFILL, max_request_tokens=99), is_serving=True)
    pool.record_answer(_facts("d:1", DECODE, max_request_tokens=20), is_serving=True)
    pool.record_answer(_facts("d:2", DECODE, max_request_tokens=30), is_serving=True)
    limits = pool.limits()
    assert limits is not None
    assert (limits.context_tokens, limits.max_request_tokens, limits.tokens) == (64, 30, 30)
