"""What has broken public systems, as directed scenarios: two prefill and two decode nodes, and one thing goes wrong.

Besides the text and the memory, which every run is judged by, each test says what clients must see.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cache_runtime.transfer.engine import PlaneKind
from simulation.campaign import explain
from simulation.model import ModelKind
from simulation.network import Meddling
from simulation.run import Outcome, simulate
from simulation.scenario import (
    BEGIN_S,
    Drain,
    Fault,
    FlipBit,
    Kill,
    LoseRun,
    MeddleWith,
    Pace,
    Partition,
    Request,
    Scenario,
    Stop,
)
from simulation.settings import ComputeSettings

# Prompts take about 30 ms to compute and generations about 100 ms.
PACE = Pace(control_s=0.0, data_s=0.01, compute_factor=10.0)


def play(
    *faults: Fault,
    kind: ModelKind = ModelKind.DENSE,
    plane: PlaneKind = PlaneKind.ONE_SIDED,
    num_prefill: int = 2,
    num_decode: int = 2,
    cancel_after_s: float | None = None,
) -> Outcome:
    settings = ComputeSettings(kind=kind, num_lcm_blocks=40, max_batch_size=8, token_budget=16, verifies=True)
    requests = tuple(
        Request(
            request_id=f"r{number}",
            at_s=BEGIN_S + 0.01 * number,
            prompt=tuple(range(7 * number, 7 * number + 20)),
            max_tokens=8,
            seed=number,
            timeout_s=60.0,
            cancel_after_s=cancel_after_s,
        )
        for number in range(6)
    )
    outcome = simulate(
        Scenario(
            seed=1,
            plane=plane,
            pace=PACE,
            prefill=(settings,) * num_prefill,
            decode=(settings,) * num_decode,
            requests=requests,
            faults=faults,
        )
    )
    assert not outcome.findings, explain(outcome)
    return outcome


def moments() -> Iterable[float]:
    """From the first prompt to the middle of the last generation."""
    return (BEGIN_S + offset_s for offset_s in (0.004, 0.04, 0.12))


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
        assert all_served(play(Kill(host="decode-1", at_s=at_s, restart_after_s=2.0), kind=kind, plane=plane))


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


def test_a_lost_run_fails_its_own_handoff_and_no_client() -> None:
    for nth in range(0, 12, 3):
        assert all_served(play(LoseRun(source="prefill-1", target="decode-1", at_s=BEGIN_S, nth=nth)))


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


def test_nodes_that_are_told_to_stop_one_after_another_fail_no_request() -> None:
    for at_s in moments():
        drains = [
            Drain(host=name, at_s=at_s + 0.05 * number, restart_after_s=0.05)
            for number, name in enumerate(("prefill-1", "decode-1"))
        ]
        assert all_served(play(*drains))
