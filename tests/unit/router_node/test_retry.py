"""Whether, when and where a request is tried again: failures, time and random numbers in, decisions out."""

from __future__ import annotations

import grpc
import pytest
from fuzz.fuzzed_mesh import all_methods, documented_statuses

from node_runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NodeError,
    PeerDraining,
    PeerUnavailable,
    PrefillDraining,
    PrefillFailed,
    QueueFull,
    RemoteError,
    RequestCancelled,
)
from node_runtime.rpc import status_of
from router_node.failures import AttemptFailure, FailureKind, failure_of, nowhere_to_go
from router_node.node_pool import ComputeRole, NodeFacts, TokenLimits
from router_node.placement import NoUsableNode, PlacementChoice
from router_node.retry import PENALTY_BROKEN, PENALTY_REFUSED, RequestRetries, RetryBudget, RetryPolicy


def _facts(address: str, role: ComputeRole) -> NodeFacts:
    return NodeFacts(
        address=address,
        node_id=address,
        incarnation=1,
        role=role,
        model_fingerprint="m",
        vocab_size=10,
        limits=TokenLimits(context_tokens=10, max_request_tokens=10),
    )


PAIR = PlacementChoice(decode=_facts("d1", ComputeRole.DECODE), prefill=_facts("p1", ComputeRole.PREFILL))
FUSED = PlacementChoice(decode=_facts("f1", ComputeRole.FUSED), prefill=None)


def _retries(
    *, max_attempts: int = 4, burst: int = 100, ratio: float = 0.0, deadline_s: float = 100.0, draw: float = 0.5
) -> RequestRetries:
    return RequestRetries(
        policy=RetryPolicy(max_attempts=max_attempts, elsewhere_backoff_s=0.1, same_backoff_s=0.2, max_backoff_s=0.5),
        budget=RetryBudget(ratio=ratio, burst=burst),
        deadline_s=deadline_s,
        draw=lambda: draw,
    )


def _broken(culprit: str = "d1", decode: str = "d1") -> AttemptFailure:
    return AttemptFailure(
        kind=FailureKind.BROKEN, error=RemoteError("UNAVAILABLE", "x"), culprit=culprit, decode=decode
    )


def _draining(culprit: str, decode: str = "d1") -> AttemptFailure:
    return AttemptFailure(
        kind=FailureKind.DRAINING, error=RemoteError("UNAVAILABLE", "x"), culprit=culprit, decode=decode
    )


def _refused(culprit: str) -> AttemptFailure:
    return AttemptFailure(
        kind=FailureKind.REFUSED, error=RemoteError("RESOURCE_EXHAUSTED", "x"), culprit=culprit, decode="d1"
    )


@pytest.mark.parametrize(
    ("error", "kind", "culprit"),
    [
        (PeerUnavailable("d1", "socket closed"), FailureKind.BROKEN, "d1"),
        (PrefillFailed("UNAVAILABLE", "died", address="p1"), FailureKind.BROKEN, "p1"),
        (PrefillFailed("DATA_LOSS", "checksum", address="p1"), FailureKind.BROKEN, "p1"),
        (PrefillFailed("RESOURCE_EXHAUSTED", "full", address="p1"), FailureKind.REFUSED, "p1"),
        (PrefillFailed("FAILED_PRECONDITION", "differs", address="p1"), FailureKind.REFUSED, "p1"),
        (PeerDraining("d1", "node d1 is draining", node_id="d1"), FailureKind.DRAINING, "d1"),
        (PrefillDraining("node p1 is draining", address="p1", node_id="p1"), FailureKind.DRAINING, "p1"),
        (RemoteError("RESOURCE_EXHAUSTED", "full"), FailureKind.REFUSED, "d1"),
        (RequestCancelled("it was stopped"), FailureKind.BROKEN, "d1"),
        (RemoteError("UNKNOWN", "Stream removed"), FailureKind.BROKEN, "d1"),
        (RemoteError("INTERNAL", "a defect"), FailureKind.FINAL, "d1"),
        (PrefillFailed("INTERNAL", "a defect", address="p1"), FailureKind.FINAL, "p1"),
        (InvalidRequest("token_ids: wrong"), FailureKind.FINAL, "d1"),
        (DeadlineExceeded("late"), FailureKind.FINAL, "d1"),
        (RemoteError("UNIMPLEMENTED", "what"), FailureKind.FINAL, "d1"),
    ],
)
def test_the_status_says_whether_another_attempt_helps_and_the_details_who_is_to_blame(
    error: NodeError, kind: FailureKind, culprit: str
) -> None:
    failure = failure_of(error, PAIR, is_first=True)
    assert (failure.kind, failure.culprit, failure.decode) == (kind, culprit, "d1")
    assert "decode node d1" in failure.error.message
    assert "prefill node p1" in failure.error.message


def test_a_name_that_is_still_live_is_final_for_a_client_and_passes_after_a_failed_attempt() -> None:
    error = RemoteError("ALREADY_EXISTS", "live")
    assert failure_of(error, PAIR, is_first=True).kind is FailureKind.FINAL
    assert failure_of(error, PAIR, is_first=False).kind is FailureKind.BROKEN


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_client_hears_after_the_last_attempt_is_documented_and_says_what_the_client_can_do(
    is_first: bool,
) -> None:
    (generate,) = (method for method in all_methods() if method.full_name == "pdmesh.v1.Inference.Generate")
    heard = {
        status_of(failure.error)
        for code in grpc.StatusCode
        if code is not grpc.StatusCode.OK
        for failure in [failure_of(RemoteError(code.name, "x"), PAIR, is_first=is_first)]
        if failure.kind is not FailureKind.FINAL
    }
    assert heard <= documented_statuses(generate)
    # The client has not cancelled, and its name is only taken by what it asked for itself.
    assert heard == {
        grpc.StatusCode[name] for name in ("UNAVAILABLE", "DATA_LOSS", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION")
    }


def test_a_hint_when_to_retry_is_kept_and_a_fused_node_can_blame_nobody_else() -> None:
    error = PrefillFailed("UNAVAILABLE", "x", address="p1")
    error.retry_after_s = 2.0
    failure = failure_of(error, FUSED, is_first=True)
    assert (failure.culprit, failure.error.retry_after_s) == ("f1", 2.0)


def test_a_prefill_node_whose_queue_is_full_can_be_waited_for() -> None:
    failure = failure_of(PrefillFailed("RESOURCE_EXHAUSTED", "full", address="p1"), PAIR, is_first=True)
    assert failure.error.retry_after_s == QueueFull.retry_after_s
    too_large = RemoteError("RESOURCE_EXHAUSTED", "the arena holds less")
    assert failure_of(too_large, PAIR, is_first=True).error.retry_after_s is None


def test_a_broken_node_is_avoided_and_the_request_goes_on() -> None:
    retries = _retries()
    retries.record(_broken("p1"))
    assert retries.penalties == {"p1": PENALTY_BROKEN}
    assert retries.decide(["d1", "p2"], now_s=0.0) == pytest.approx(0.05)
    # With nobody else left the same node is asked again, after a time in which it may recover.
    assert retries.decide(["d1", "p1"], now_s=0.0) == pytest.approx(0.1)
    assert retries.decide([], now_s=0.0) == pytest.approx(0.1)


def test_a_node_that_refused_is_not_asked_again() -> None:
    retries = _retries()
    retries.record(_refused("p1"))
    assert retries.penalties == {"p1": PENALTY_REFUSED}
    assert retries.decide(["d1", "p1"], now_s=0.0) is None
    assert retries.decide(["d1", "p2"], now_s=0.0) is not None
    retries.record(_broken("p1"))
    assert retries.penalties == {"p1": PENALTY_REFUSED}


def test_a_decode_node_with_which_two_prefill_nodes_fail_is_avoided_too() -> None:
    retries = _retries()
    retries.record(_broken("p1", decode="d1"))
    retries.record(_broken("p1", decode="d1"))
    assert "d1" not in retries.penalties
    retries.record(_broken("p2", decode="d1"))
    assert retries.penalties == {"p1": PENALTY_BROKEN, "p2": PENALTY_BROKEN, "d1": PENALTY_BROKEN}


def test_leaving_a_node_that_drains_is_free_and_comes_at_once() -> None:
    retries = _retries(max_attempts=1, burst=0)
    for node in ("p1", "p2", "p3"):
        retries.record(_draining(node))
        assert retries.decide(["d1", "p4"], now_s=0.0) == 0.0
    # Nobody is to blame, so the decode node with which they were is not either.
    assert "d1" not in retries.penalties
    assert retries.num_failures == 0
    retries.record(_broken("p4"))
    assert retries.decide(["d1", "p5"], now_s=0.0) is None


def test_where_only_nodes_are_left_that_drain_or_failed_a_drain_is_an_attempt_like_others() -> None:
    retries = _retries(max_attempts=2, burst=1)
    retries.record(_draining("p1"))
    # It may be back soon, under the same address.
    assert retries.decide([], now_s=0.0) == pytest.approx(0.1)
    retries.record(_draining("p1"))
    assert retries.decide(["d1", "p1"], now_s=0.0) is None
    late = _retries(deadline_s=1.0)
    late.record(_draining("p1"))
    assert late.decide(["d1", "p2"], now_s=1.0) is None


def test_what_is_final_is_not_tried_again() -> None:
    retries = _retries()
    retries.record(failure_of(InvalidRequest("x"), PAIR, is_first=True))
    assert retries.decide(["d2", "p2"], now_s=0.0) is None


def test_waiting_for_nodes_counts_as_an_attempt() -> None:
    retries = _retries(max_attempts=3)
    retries.record(_broken())
    assert retries.decide([], now_s=0.0) is not None
    retries.record(nowhere_to_go(NoUsableNode("none"), after=_broken()))
    assert retries.decide([], now_s=0.0) is not None
    retries.record(nowhere_to_go(NoUsableNode("none"), after=_broken()))
    assert retries.decide([], now_s=0.0) is None


def test_attempts_are_bounded_and_waits_grow_to_their_limit() -> None:
    retries = _retries(max_attempts=6, draw=0.999)
    waits = []
    for _ in range(5):
        retries.record(_broken())
        waits.append(retries.decide(["d2"], now_s=0.0))
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5], rel=0.01)
    retries.record(_broken())
    assert retries.decide(["d2"], now_s=0.0) is None


def test_waits_are_spread_over_their_whole_range() -> None:
    retries = _retries(draw=0.0)
    retries.record(_broken())
    assert retries.decide(["d2"], now_s=0.0) == 0.0


def test_no_attempt_begins_at_or_after_the_deadline() -> None:
    retries = _retries(deadline_s=10.0)
    retries.record(_broken())
    assert retries.decide(["d2"], now_s=9.94) is not None
    assert retries.decide(["d2"], now_s=9.95) is None
    assert retries.decide(["d2"], now_s=11.0) is None


def test_retries_of_all_requests_share_one_budget() -> None:
    budget = RetryBudget(ratio=0.5, burst=2)

    def is_retried() -> bool:
        retries = RequestRetries(policy=RetryPolicy(), budget=budget, deadline_s=100.0, draw=lambda: 0.5)
        retries.record(_broken())
        return retries.decide(["d2"], now_s=0.0) is not None

    # The burst first, then one retry for every two requests, however many want one.
    assert [is_retried() for _ in range(9)] == [True, True, True, False, True, False, True, False, True]


def test_a_decision_against_a_retry_costs_no_budget() -> None:
    budget = RetryBudget(ratio=0.0, burst=5)
    retries = RequestRetries(policy=RetryPolicy(), budget=budget, deadline_s=1.0, draw=lambda: 0.5)
    retries.record(_broken())
    assert retries.decide(["d2"], now_s=2.0) is None
    retries.record(_refused("p1"))
    assert retries.decide(["p1"], now_s=0.0) is None
    assert budget.num_left == 5


def test_saved_retries_never_exceed_the_burst() -> None:
    budget = RetryBudget(ratio=1.0, burst=3)
    for _ in range(100):
        budget.earn()
    assert budget.num_left == 3
    assert [budget.try_spend() for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RetryPolicy(max_attempts=0), "max_attempts: 0 given"),
        (lambda: RetryPolicy(same_backoff_s=3.0), "0.025, 3.0, 2.0 given"),
        (lambda: RetryBudget(ratio=1.5, burst=1), "ratio: 1.5 given"),
        (lambda: RetryBudget(ratio=0.5, burst=-1), "burst: -1 given"),
    ],
)
def test_limits_that_make_no_sense_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_when_nobody_is_left_the_client_hears_why_and_what_came_before() -> None:
    lack = NoUsableNode("no decode node is usable")
    failure = nowhere_to_go(lack, after=failure_of(PeerUnavailable("d1", "socket closed"), PAIR, is_first=True))
    assert failure.error.message.startswith("no decode node is usable, after decode node d1")
    assert "socket closed" in failure.error.message
    assert failure.error.retry_after_s == 1.0
    assert nowhere_to_go(lack, after=failure) is failure


def test_every_status_has_a_meaning() -> None:
    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK:
            assert failure_of(RemoteError(code.name, "x"), PAIR, is_first=True).kind in FailureKind
