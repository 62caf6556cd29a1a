"""The choice of a pair, as a function of what is known about the nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router_node.node_pool import ComputeRole, NodeFacts, TokenLimits
from router_node.placement import PlacementChoice
from router_node.placement_policy import CostRates, Decision, Demand, NodeView, PolicyName, decide

PREFILL, DECODE, FUSED = ComputeRole.PREFILL, ComputeRole.DECODE, ComputeRole.FUSED
ROLES = {"p": PREFILL, "d": DECODE, "f": FUSED}
RATES = CostRates(
    prefill_tokens_per_s=1000,
    transfer_tokens_per_s=10_000,
    handoff_s=0,
    bootstrap_s=0.5,
    stream_s=0.01,
    residence_s=10,
    work_weight=0,
)
PROMPT = Demand(prompt_tokens=1000, max_tokens=100)


def node(name: str, *, capacity_tokens: int = 100_000, **fields: object) -> NodeView:
    """A node whose role is its first letter."""
    facts = NodeFacts(
        address=name,
        node_id=name,
        incarnation=1,
        role=ROLES[name[0]],
        model_fingerprint="m",
        vocab_size=100,
        limits=TokenLimits(context_tokens=100_000, max_request_tokens=capacity_tokens),
        capacity_tokens=capacity_tokens,
    )
    return NodeView(facts=facts, **fields)  # type: ignore[arg-type]


def decision(
    *nodes: NodeView, demand: Demand = PROMPT, policy: PolicyName = "cache_aware", rates: CostRates = RATES
) -> Decision:
    made = decide(
        [view for view in nodes if view.facts.role is PREFILL],
        [view for view in nodes if view.facts.role is not PREFILL],
        demand,
        policy=policy,
        rates=rates,
    )
    assert made is not None
    return made


def chosen(*nodes: NodeView, demand: Demand = PROMPT, policy: PolicyName = "cache_aware") -> tuple[str, ...]:
    pair = decision(*nodes, demand=demand, policy=policy).pair
    return tuple(view.facts.node_id for view in (pair.decode, pair.prefill) if view is not None)


# cache_aware.


def test_the_longest_cached_prefix_wins_on_both_sides() -> None:
    assert chosen(node("p1"), node("p2", cached_tokens=512), node("p3", cached_tokens=256), node("d1"), node("d2")) == (
        "d1",
        "p2",
    )
    # Nothing hides the transfer of a prompt that is all cached: what the decode node has counts.
    cached = node("p1", cached_tokens=960)
    assert chosen(cached, node("d1"), node("d2", cached_tokens=900)) == ("d2", "p1")


def test_a_queue_is_weighed_against_the_prefix_in_seconds() -> None:
    """A second of queue is worth a thousand tokens at a thousand tokens per second."""
    far, near = node("p1", cached_tokens=800, queued_tokens=700), node("p2")
    assert chosen(far, near, node("d1")) == ("d1", "p1")
    far = replace(far, queued_tokens=900)
    made = decision(far, near, node("d1"))
    assert made.pair.computes is near
    assert made.reason == "a longer prefix is cached where the wait is longer"
    assert (made.estimate.queue_s, made.estimate.compute_s) == (0, 1.0)
    # The same queue is short on a node that is measured to be fast.
    fast, slow = replace(far, prefill_tokens_per_s=4000), replace(near, prefill_tokens_per_s=1000)
    assert chosen(fast, slow, node("d1")) == ("d1", "p1")


def test_work_that_is_done_twice_counts_for_those_behind_it_too() -> None:
    far, near = node("p1", cached_tokens=800, queued_tokens=900), node("p2")
    assert decision(far, near, node("d1")).pair.computes is near
    careful = replace(RATES, work_weight=2)
    made = decision(far, near, node("d1"), rates=careful)
    assert made.pair.computes is far
    assert made.estimate.work_s == pytest.approx(0.4)
    assert decision(replace(far, queued_tokens=2500), near, node("d1"), rates=careful).pair.computes is near


def test_a_node_that_has_more_than_its_share_gives_new_work_away_and_keeps_what_it_has_cached() -> None:
    busy = node("p1", cached_tokens=64, share_tokens=30_000.0)
    others = [node(f"p{number}", share_tokens=2_000.0) for number in (2, 3, 4)]
    assert chosen(busy, *others, node("d1")) != ("d1", "p1")
    kept = replace(busy, cached_tokens=9_900, share_tokens=12_000.0)
    assert chosen(kept, *others, node("d1"), demand=replace(PROMPT, prompt_tokens=10_000)) == ("d1", "p1")


def test_the_imbalance_that_shared_prefixes_make_is_bounded() -> None:
    """Everybody shares 500 tokens that one node has, and nobody waits for anybody: it still does not get them all."""
    shares = dict.fromkeys(("p1", "p2", "p3", "p4"), 0.0)
    cached = {"p1"}
    for _ in range(400):
        views = [
            node(name, share_tokens=share, cached_tokens=500 if name in cached else 0) for name, share in shares.items()
        ]
        name = chosen(*views, node("d1"))[1]
        shares[name] += 500 if name in cached else 1000
        cached.add(name)
    mean = sum(shares.values()) / len(shares)
    assert max(shares.values()) <= 1.25 * mean + 500 / RATES.share_weight


def test_a_decode_node_without_memory_or_with_many_streams_is_avoided() -> None:
    full = node("d1", free_tokens=100, capacity_tokens=10_000)
    assert chosen(node("p1"), full, node("d2", num_requests=20)) == ("d2", "p1")
    assert chosen(node("p1"), node("d1", num_requests=9), node("d2", num_requests=8)) == ("d2", "p1")
    made = decision(node("p1"), full)
    # A tenth of its memory is lacking, and all of it comes free in ten seconds.
    assert made.estimate.decode_s == pytest.approx(1.0)


def test_a_pair_whose_data_plane_is_proved_is_preferred_and_one_that_does_not_work_is_the_last() -> None:
    proved = node("d2", peers={"p1": True}, num_requests=10)
    assert chosen(node("p1"), node("d1"), proved) == ("d2", "p1")
    assert chosen(node("p1"), node("d1"), replace(proved, num_requests=100)) == ("d1", "p1")
    broken = node("d1", peers={"p1": False})
    assert chosen(node("p1"), broken, replace(proved, num_requests=1000)) == ("d2", "p1")
    assert chosen(node("p1"), node("p2", queued_tokens=5000), broken) == ("d1", "p2")
    assert chosen(node("p1"), broken) == ("d1", "p1")


def test_a_fused_node_is_weighed_against_pairs_by_the_same_estimate() -> None:
    assert chosen(node("f1"), node("p1"), node("d1")) == ("f1",)
    assert chosen(node("f1", queued_tokens=2000), node("p1"), node("d1")) == ("d1", "p1")


def test_the_transfer_counts_only_where_no_computation_hides_it() -> None:
    slow = replace(RATES, transfer_tokens_per_s=500)
    made = decision(node("p1", cached_tokens=500), node("d1", peers={"p1": True}), rates=slow)
    assert (made.estimate.compute_s, made.estimate.transfer_s) == (0.5, 1.5)
    assert made.estimate.total_s == pytest.approx(2.0)


# Other policies.


def test_least_loaded_counts_requests_and_takes_turns() -> None:
    nodes = [node("p1", num_requests=2), node("p2", num_requests=1), node("d1", num_requests=1), node("d2")]
    assert chosen(*nodes, policy="least_loaded") == ("d2", "p2")
    # What is cached does not matter to it.
    assert chosen(*nodes, node("p3", num_requests=3, cached_tokens=960), policy="least_loaded") == ("d2", "p2")
    assert chosen(node("p1", last_turn=2), node("p2", last_turn=1), node("d1"), policy="least_loaded") == ("d1", "p2")


def test_round_robin_looks_at_turns_alone() -> None:
    nodes = [node("p1", last_turn=3), node("p2", num_requests=9, last_turn=2), node("d1", last_turn=5), node("d2")]
    assert chosen(*nodes, policy="round_robin") == ("d2", "p2")


def test_pinned_sends_the_same_beginning_to_the_same_nodes_and_moves_little_when_one_leaves() -> None:
    nodes = [node(f"{role}{number}") for role in "pd" for number in range(5)]

    def places(*views: NodeView) -> dict[int, tuple[str, ...]]:
        return {
            number: chosen(*views, demand=replace(PROMPT, beginning=b"%d" % number), policy="pinned")
            for number in range(60)
        }

    before = places(*nodes)
    assert before == places(*reversed(nodes))
    assert len(set(before.values())) > 10
    gone = nodes[2]
    after = places(*(view for view in nodes if view is not gone))
    moved = [number for number in before if before[number] != after[number]]
    assert moved == [number for number in before if gone.facts.node_id in before[number]]


# What comes before every policy.


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded", "round_robin", "pinned"])
def test_no_policy_overrules_what_failed_or_does_not_fit(policy: PolicyName) -> None:
    nodes = [
        node("p1", penalty=2, cached_tokens=960),
        node("p2", num_requests=50, queued_tokens=90_000, last_turn=9),
        node("p3", is_trusted=False),
        node("d1", capacity_tokens=1050),
        node("d2", num_requests=50, last_turn=9),
        node("d3", is_trusted=False),
    ]
    assert chosen(*nodes, policy=policy) == ("d2", "p2")


def test_a_request_that_fits_nowhere_is_not_placed() -> None:
    assert decide([node("p1")], [node("d1", capacity_tokens=1000)], PROMPT, policy="cache_aware", rates=RATES) is None
    assert decide([], [node("d1")], PROMPT, policy="cache_aware", rates=RATES) is None


def test_among_many_nodes_the_best_pair_is_found() -> None:
    crowd = [
        node(f"{role}{number}", num_requests=number, queued_tokens=100.0 * number)
        for role in "pd"
        for number in range(40)
    ]
    special = node("p99", cached_tokens=990), node("d99", cached_tokens=990)
    made = decision(*crowd, *special)
    assert (made.pair.decode.facts.node_id, made.pair.computes.facts.node_id) == ("d99", "p99")
    assert made.num_candidates == 16


def test_a_trace_tells_of_other_pairs_in_numbers_that_can_be_read() -> None:
    made = decision(
        node("p1"),
        node("p2", cached_tokens=1024, queued_tokens=90_000),
        node("d1"),
        demand=replace(PROMPT, prompt_tokens=4000),
    )
    assert made.pair.prefill is not None
    choice = PlacementChoice(decode=made.pair.decode.facts, prefill=made.pair.prefill.facts, decision=made)
    assert choice.explanation()["pdmesh.place.runners_up"] == ["p2 > d1: 93,476.0 ms, 1,024 cached"]


def test_the_decision_explains_itself() -> None:
    made = decision(node("p1", cached_tokens=512), node("p2"), node("d1"))
    assert (made.policy, made.reason, made.num_candidates) == ("cache_aware", "the longest cached prefix", 2)
    ((runner_up, estimate),) = made.runners_up
    assert str(runner_up) == "p2 > d1"
    assert estimate.total_s > made.estimate.total_s
    assert decision(node("f1")).reason == "the only pair"
    assert decision(node("f1"), node("f2")).reason == "nothing is cached: the shortest wait"
    assert decision(node("f1", penalty=2), node("f2", penalty=2)).reason == "the least bad: all failed this request"


def test_rates_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"transfer_tokens_per_s: 0 given, a positive number required"):
        CostRates(transfer_tokens_per_s=0)
