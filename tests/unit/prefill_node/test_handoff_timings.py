"""Milliseconds per phase, from what the engine and the data plane measured."""

from __future__ import annotations

from model_runtime.sampler import SampledToken
from node_runtime.handoff.messages import HandoffTimings
from prefill_node.handoff import Progress, measured_timings
from prefill_node.outgoing import BusySpan, TransferSummary


def progress(*busy: tuple[float, float]) -> Progress:
    return Progress(
        started_at_s=1.0,
        admitted_at_s=1.5,
        first_token=SampledToken(token_id=1),
        first_token_at_s=3.0,
        transfer=TransferSummary(num_bytes=1, num_runs=1, busy=tuple(BusySpan(*span) for span in busy)),
    )


def test_pauses_between_writes_are_no_transfer_and_only_the_tail_is_exposed() -> None:
    timings = measured_timings(progress((1.75, 2.0), (2.5, 2.75), (2.875, 3.25)))
    assert timings == HandoffTimings(queue_ms=500.0, compute_ms=1500.0, transfer_ms=875.0, transfer_exposed_ms=250.0)


def test_a_transfer_that_ends_with_the_compute_is_wholly_hidden() -> None:
    assert measured_timings(progress((2.0, 2.75))).transfer_exposed_ms == 0.0


def test_a_transfer_that_starts_late_is_exposed_from_its_own_start() -> None:
    timings = measured_timings(progress((4.0, 5.0)))
    assert (timings.transfer_ms, timings.transfer_exposed_ms) == (1000.0, 1000.0)


def test_what_did_not_happen_counts_nothing() -> None:
    assert measured_timings(Progress(started_at_s=1.0)) == HandoffTimings()
    assert measured_timings(progress()).transfer_ms == 0.0
