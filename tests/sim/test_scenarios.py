"""What has broken public systems, as directed scenarios: two prefill and two decode nodes, and one thing goes wrong.

Besides the text and the memory, which every run is judged by, each test says what clients must see.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from cache_runtime.transfer.engine import PlaneKind
from simulation.campaign import explain
from simulation.faults import (
    Asking,
    ClearCache,
    Drain,
    Fault,
    FlipBit,
    Hang,
    Kill,
    KillRank,
    LateRank,
    LoseRun,
    MeddleWith,
    Partition,
    RollingRestart,
    Slow,
    Stop,
)
from simulation.model import ModelKind
from simulation.network import Meddling
from simulation.run import Outcome, simulate
from simulation.scenario import BEGIN_S, Pace, Request, Scenario
from simulation.settings import PLAIN_ROUTER, ComputeSettings, RouterSettings

# The first token comes after about 100 ms, the last one of the last request after 400 ms.
PACE = Pace(control_s=0.0, data_s=0.01, compute_factor=10.0)


def play(
    *faults: Fault,
    kind: ModelKind = ModelKind.DENSE,
    plane: PlaneKind = PlaneKind.ONE_SIDED,
    num_prefill: int = 2,
    num_decode: int = 2,
    num_fused: int = 0,
    num_requests: int = 6,
    num_samples: int = 1,
    num_decode_ranks: int | None = None,
    cancel_after_s: float | None = None,
    gap_s: float = 0.01,
    router: RouterSettings = PLAIN_ROUTER,
    is_verbose: bool = False,
    **traits: object,
) -> Outcome:
    """`traits` are those of all nodes; decode nodes have `num_decode_ranks` where they have a number of their own."""
    settings = replace(
        ComputeSettings(kind=kind, num_lcm_blocks=40, max_batch_size=8, token_budget=16, verifies=True), **traits
    )
    decode = settings if num_decode_ranks is None else replace(settings, num_tensor_ranks=num_decode_ranks)
    requests = tuple(
        Request(
            request_id=f"r{number}",
            at_s=BEGIN_S + gap_s * number,
            prompt=tuple(range(7 * number, 7 * number + 20)),
            max_tokens=8,
            seed=number,
            timeout_s=60.0,
            cancel_after_s=cancel_after_s,
            num_samples=num_samples,
        )
        for number in range(num_requests)
    )
    outcome = simulate(
        Scenario(
            seed=1,
            plane=plane,
            pace=PACE,
            prefill=(settings,) * num_prefill,
            decode=(decode,) * num_decode,
            fused=(settings,) * num_fused,
            router=router,
            requests=requests,
            faults=faults,
        ),
        is_verbose=is_verbose,
    )
    assert not outcome.findings, explain(outcome)
    return outcome


def moments() -> Iterable[float]:
    """From the first prompt to the middle of the generations, when all prompts are computed."""
    return (BEGIN_S + offset_s for offset_s in (0.004, 0.04, 0.14))


def all_served(outcome: Outcome) -> bool:
    return set(outcome.statuses) == {"OK"}


@pytest.mark.parametrize("kind", ModelKind)
@pytest.mark.parametrize("plane", PlaneKind)
def test_clients_see_nothing_of_a_prefill_node_that_dies(kind: ModelKind, plane: PlaneKind) -> None:
    for at_s in moments():
        assert all_served(play(Kill(host="prefill-1", at_s=at_s, restart_after_s=2.0), kind=kind, plane=plane))


@pytest.mark.parametrize("kind", ModelKind)
@pytest.mark.parametrize("plane", PlaneKind)
def test_streams_go_on_without_a_seam_when_a_decode_node_dies(kind: ModelKind, plane: PlaneKind) -> None:
    for at_s in moments():
        outcome = play(Kill(host="decode-1", at_s=at_s, restart_after_s=2.0), kind=kind, plane=plane)
        assert all_served(outcome)
    assert outcome.seen["continuation"]


def test_a_prefill_node_that_restarts_at_its_address_is_another_peer() -> None:
    for at_s in moments():
        outcome = play(Kill(host="prefill-1", at_s=at_s, restart_after_s=0.02), num_prefill=1)
        # What was promised to the old process may be lost; everything after it is served.
        assert outcome.statuses[-2:] == ("OK", "OK")


@pytest.mark.parametrize("plane", PlaneKind)
def test_a_writer_that_sleeps_through_its_lease_writes_nothing_when_it_wakes(plane: PlaneKind) -> None:
    for at_s in moments():
        assert all_served(play(Stop(host="prefill-1", at_s=at_s, for_s=25.0), plane=plane))


def test_a_decode_node_that_sleeps_is_replaced_and_wakes_without_harm() -> None:
    for at_s in moments():
        assert all_served(play(Stop(host="decode-1", at_s=at_s, for_s=25.0)))


@pytest.mark.parametrize("plane", PlaneKind)
def test_clients_that_all_leave_at_once_leave_nothing_behind(plane: PlaneKind) -> None:
    for delay_s in (0.001, 0.02, 0.05, 0.1):
        outcome = play(cancel_after_s=delay_s, plane=plane)
        assert set(outcome.statuses[:6]) <= {"LEFT", "OK"}


@pytest.mark.parametrize(("control", "data"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("is_mutual", [True, False])
def test_a_partition_between_two_nodes_is_routed_around(control: bool, data: bool, is_mutual: bool) -> None:
    ends = {"source": "prefill-1", "target": "decode-1"}
    partition = Partition(**ends, at_s=BEGIN_S + 0.03, for_s=20.0, control=control, data=data, is_mutual=is_mutual)
    assert all_served(play(partition))


@pytest.mark.parametrize("kind", ModelKind)
def test_a_lost_run_fails_its_own_handoff_and_no_client(kind: ModelKind) -> None:
    for nth in range(0, 12, 4):
        assert all_served(play(LoseRun(source="prefill-1", target="decode-1", at_s=BEGIN_S, nth=nth), kind=kind))


def test_a_wrong_bit_is_found_before_anything_reads_it() -> None:
    for nth in range(0, 12, 3):
        assert all_served(play(FlipBit(source="prefill-1", target="decode-1", at_s=BEGIN_S, nth=nth)))


@pytest.mark.parametrize("kind", [Meddling.DUPLICATE, Meddling.REPLAY, Meddling.DELAY])
@pytest.mark.parametrize("ways", [("prefill-1", "decode-1"), ("decode-1", "prefill-1")])
def test_late_and_repeated_messages_change_nothing(kind: Meddling, ways: tuple[str, str]) -> None:
    meddling = MeddleWith(source=ways[0], target=ways[1], at_s=BEGIN_S, nth=0, num_frames=50, kind=kind, seconds=0.05)
    assert all_served(play(meddling))


def test_a_connection_that_breaks_at_any_message_is_no_clients_concern() -> None:
    for nth in range(8):
        fault = MeddleWith(
            source="prefill-1", target="decode-1", at_s=BEGIN_S, nth=nth, num_frames=1, kind=Meddling.BREAK
        )
        assert all_served(play(fault))


@pytest.mark.parametrize("asking", Asking)
def test_a_node_that_is_told_to_leave_finishes_what_it_has_begun(asking: Asking) -> None:
    for name in ("prefill-1", "decode-1", "router"):
        drain = Drain(host=name, at_s=BEGIN_S + 0.07, restart_after_s=0.05, asking=asking)
        outcome = play(drain)
        assert all_served(outcome)
        assert outcome.seen["left"] == 1


def test_nodes_that_are_told_to_stop_one_after_another_fail_no_request() -> None:
    for at_s in moments():
        drains = [
            Drain(host=name, at_s=at_s + 0.05 * number, restart_after_s=0.05)
            for number, name in enumerate(("prefill-1", "decode-1"))
        ]
        assert all_served(play(*drains))


@pytest.mark.parametrize("asking", [Asking.SIGNAL, Asking.CALL])
def test_no_client_sees_anything_of_a_restart_of_all_nodes_one_by_one(asking: Asking) -> None:
    hosts = ("prefill-1", "prefill-2", "decode-1", "decode-2", "fused-1")
    restart = RollingRestart(hosts=hosts, at_s=BEGIN_S + 0.03, restart_after_s=0.1, pause_s=1.5, asking=asking)
    outcome = play(restart, num_fused=1)
    assert all_served(outcome)
    assert outcome.seen["left"] == len(hosts)


def test_streams_go_on_at_a_fused_node_when_no_other_is_left() -> None:
    for at_s in moments():
        outcome = play(Kill(host="decode-1", at_s=at_s, restart_after_s=9.0), num_prefill=1, num_decode=1, num_fused=1)
        assert all_served(outcome)
        assert outcome.seen["fused prompt"]


@pytest.mark.parametrize("kind", ModelKind)
def test_a_node_of_two_tensor_ranks_has_the_text_of_one_however_late_a_rank_is(kind: ModelKind) -> None:
    nodes = {"num_prefill": 0, "num_decode": 0, "num_fused": 1, "num_tensor_ranks": 2}
    assert all_served(play(kind=kind, **nodes))
    assert all_served(play(LateRank(host="fused-1", at_s=BEGIN_S, for_s=2.0, seconds=0.1), kind=kind, **nodes))


def test_a_node_that_loses_a_rank_leaves_and_another_one_goes_on_with_its_streams() -> None:
    for at_s in moments():
        loss = KillRank(host="fused-1", at_s=at_s, restart_after_s=0.5)
        outcome = play(loss, num_prefill=0, num_decode=0, num_fused=2, num_tensor_ranks=2)
        assert all_served(outcome)
        assert outcome.seen["rank lost"] == outcome.seen["left"] == 1


@pytest.mark.parametrize("kind", ModelKind)
@pytest.mark.parametrize("plane", PlaneKind)
@pytest.mark.parametrize(("num_prefill_ranks", "num_decode_ranks"), [(1, 2), (2, 1), (2, 2)])
def test_caches_come_over_whole_between_nodes_of_unlike_numbers_of_ranks_however_late_one_is(
    kind: ModelKind, plane: PlaneKind, num_prefill_ranks: int, num_decode_ranks: int
) -> None:
    late = tuple(LateRank(host=host, at_s=BEGIN_S, for_s=2.0, seconds=0.1) for host in ("prefill-1", "decode-1"))
    outcome = play(*late, kind=kind, plane=plane, num_tensor_ranks=num_prefill_ranks, num_decode_ranks=num_decode_ranks)
    assert all_served(outcome)


@pytest.mark.parametrize("kind", ModelKind)
@pytest.mark.parametrize("host", ["prefill-1", "decode-1"])
def test_a_prefill_or_decode_node_that_loses_a_rank_leaves_and_its_requests_go_on_elsewhere(
    kind: ModelKind, host: str
) -> None:
    for at_s in moments():
        outcome = play(KillRank(host=host, at_s=at_s, restart_after_s=0.5), kind=kind, num_tensor_ranks=2)
        assert all_served(outcome)
        assert outcome.seen["rank lost"] == outcome.seen["left"] == 1


def test_a_bit_that_flips_on_the_way_to_a_rank_is_found_and_the_request_placed_anew() -> None:
    for nth in (1, 5, 20):
        flip = FlipBit(source="prefill-1", target="decode-1", at_s=BEGIN_S, nth=nth)
        outcome = play(flip, num_prefill=2, num_decode=1, num_tensor_ranks=1, num_decode_ranks=2)
        assert all_served(outcome)


def test_a_cache_is_cleared_when_nobody_needs_it_and_never_before() -> None:
    busy = play(*(ClearCache(host=name, at_s=BEGIN_S + 0.07) for name in ("prefill-1", "decode-1")))
    assert all_served(busy)
    assert busy.seen["clear FAILED_PRECONDITION"]
    idle = play(*(ClearCache(host=name, at_s=BEGIN_S + 5.0) for name in ("prefill-1", "decode-1")))
    assert idle.seen["clear OK"] == 2


def test_a_burst_beyond_small_queues_is_served_in_turn() -> None:
    """That none passes another is judged in every run: here they are many, and all of one size."""
    burst = play(num_prefill=1, num_decode=1, num_requests=20, max_ready_ungranted=2, max_batch_size=2)
    assert all_served(burst)


def test_a_slow_prefill_node_fills_no_log() -> None:
    slow = Slow(host="prefill-1", at_s=BEGIN_S, for_s=20.0, control_s=0.5, data_s=0.5, compute_factor=30.0)
    outcome = play(slow, num_prefill=1, num_decode=1, is_verbose=True)
    assert all_served(outcome)
    said = [line for line in outcome.lines if " decode-1 " in line and " log" in line]
    assert len(said) <= 3 * len(outcome.statuses), said


def test_clients_that_leave_while_requests_give_way_leave_nothing_behind() -> None:
    num_retractions = 0
    for cancel_after_s in (None, 0.15, 0.2, 0.25):
        outcome = play(
            num_prefill=1,
            num_decode=1,
            num_requests=8,
            num_lcm_blocks=14,
            is_overcommitted=True,
            cancel_after_s=cancel_after_s,
        )
        num_retractions += outcome.seen.get("retraction", 0)
        assert set(outcome.statuses) <= {"OK", "LEFT"}
    assert num_retractions


@pytest.mark.parametrize("plane", PlaneKind)
def test_a_slow_first_token_is_hedged_and_the_attempt_that_loses_leaves_nothing_behind(plane: PlaneKind) -> None:
    """That the text is that of one attempt and that the other one ends with it is judged in every run."""
    router = RouterSettings(hedge_after_s=0.1)
    slow = Slow(host="prefill-1", at_s=BEGIN_S, for_s=5.0, control_s=0.0, data_s=0.0, compute_factor=20.0)
    outcome = play(slow, plane=plane, router=router)
    assert all_served(outcome)
    assert outcome.seen["hedge won"]
    hurried = play(plane=plane, router=RouterSettings(hedge_after_s=0.01))
    assert all_served(hurried)
    assert hurried.seen["hedge lost"]


def test_clients_that_leave_while_two_attempts_run_leave_nothing_behind() -> None:
    for delay_s in (0.012, 0.02, 0.05):
        outcome = play(cancel_after_s=delay_s, router=RouterSettings(hedge_after_s=0.01))
        assert outcome.seen["hedge"]
        assert set(outcome.statuses[:6]) == {"LEFT"}


def test_what_is_later_than_most_requests_were_is_hedged() -> None:
    router = RouterSettings(hedge_percentile=0.9)
    assert "hedge" not in play(num_requests=20, gap_s=0.1, router=router).seen
    outcome = play(Hang(host="prefill-1", at_s=BEGIN_S + 4.0, for_s=2.0), num_requests=44, gap_s=0.1, router=router)
    assert all_served(outcome)
    assert outcome.seen["hedge won"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_leave_a_node_whose_engine_hangs_behind_a_connection_that_lives(role: str) -> None:
    num_moved = []
    for at_s in moments():
        outcome = play(Hang(host=f"{role}-1", at_s=at_s, for_s=50.0), router=RouterSettings(silence_timeout_s=1.0))
        assert all_served(outcome)
        num_moved.append(outcome.seen.get("placed anew", 0))
        assert outcome.seen.get("move on silence", 0) == (num_moved[-1] if role == "decode" else 0)
    # In the end nobody needs a prefill node any more.
    assert all(num_moved if role == "decode" else num_moved[:-1])


@pytest.mark.parametrize("host", ["prefill-1", "decode-1"])
def test_samples_of_one_request_are_what_requests_of_their_own_would_get_also_when_a_node_dies(host: str) -> None:
    for at_s in moments():
        assert all_served(play(Kill(host=host, at_s=at_s, restart_after_s=2.0), num_samples=3, num_requests=4))


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin", "pinned"])
def test_a_router_that_follows_nodes_knows_what_is_cached_after_a_restart_and_a_cleared_cache(policy: str) -> None:
    """What it believes in the end is judged in every run that follows nodes."""
    router = RouterSettings(placement_policy=policy, follow_interval_s=0.05)
    for at_s in (*moments(), BEGIN_S + 1.0):
        restarted = Kill(host="prefill-1", at_s=at_s, restart_after_s=0.5)
        cleared = ClearCache(host="decode-1", at_s=at_s + 2.0)
        assert all_served(play(restarted, cleared, router=router))


def test_a_router_that_is_cut_off_from_what_a_node_tells_serves_all_the_same() -> None:
    router = RouterSettings(placement_policy="cache_aware", follow_interval_s=0.05)
    for source, target in (("prefill-1", "router"), ("decode-1", "router")):
        cut = Partition(
            source=source,
            target=target,
            at_s=BEGIN_S + 0.05,
            for_s=20.0,
            control=True,
            data=False,
            is_mutual=False,
        )
        assert all_served(play(cut, router=router))
