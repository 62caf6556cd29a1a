"""Whole meshes in virtual time: known seeds, fresh ones, and that a run is a function of its seed."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from simulation.campaign import explain, run_seed
from simulation.drawing import draw_scenario
from simulation.pointed import draw_hedges, draw_lost_stream, draw_silence, with_rivals
from simulation.run import simulate
from simulation.scenario import Scenario
from simulation.tenants import ROOMY

# Then requests that wait for others' samples, for which memory is there one at a time, and a node whose power is cut
# while it is to be asked to leave, a write that fails between a bootstrap and the first handoff after it, and a second
# attempt that overtakes the news of how the first one ended.
FIXED_SEEDS = (*range(60, 120), 30_791_249, 1_950_185_448, 1_950_204_377, 259_183_328)
NUM_FRESH_SEEDS = 40


def test_no_known_seed_breaks_a_promise_and_all_that_can_happen_does() -> None:
    num_runs: Counter[str] = Counter()
    for seed in FIXED_SEEDS:
        outcome = run_seed(seed)
        assert not outcome.findings, explain(outcome)
        num_runs.update(outcome.seen.keys())
    # A simulator that gets nowhere finds nothing.
    for name in (
        "quarantine",
        "retraction",
        "local prefill",
        "fused prompt",
        "rank lost",
        "left",
        "rolling restart",
        "clear OK",
        "clear FAILED_PRECONDITION",
        "placed anew",
        "wrong bit",
        "hedge won",
        "hedge lost",
        "several samples",
        "move on silence",
        "continuation",
    ):
        assert num_runs[name], f"no known seed sees: {name}"


@pytest.mark.parametrize(
    ("draw", "name"),
    [(draw_hedges, "hedge"), (draw_lost_stream, "continuation"), (draw_silence, "move on silence")],
)
def test_scenarios_about_what_seldom_comes_about_by_chance_see_it(
    draw: Callable[[Random, Scenario], Scenario], name: str
) -> None:
    for seed in range(12):
        rng = Random(seed)
        outcome = simulate(draw(rng, with_rivals(rng, replace(draw_scenario(seed), faults=()))))
        assert not outcome.findings, explain(outcome)
        if name in outcome.seen:
            return
    pytest.fail(f"none sees: {name}")


def test_no_fresh_seed_breaks_a_promise() -> None:
    first = secrets.randbits(31)
    for seed in range(first, first + NUM_FRESH_SEEDS):
        outcome = run_seed(seed)
        assert not outcome.findings, explain(outcome)


def test_every_request_is_answered_when_nothing_fails() -> None:
    for seed in range(8):
        scenario = draw_scenario(seed)
        unhindered = {"timeout_s": 15.0, "cancel_after_s": None, "max_tokens": 3}
        patient = tuple(replace(item, tenant=ROOMY if item.tenant else "", **unhindered) for item in scenario.requests)
        outcome = simulate(replace(scenario, faults=(), requests=patient))
        assert not outcome.findings, explain(outcome)
        assert set(outcome.statuses) == {"OK"}


def test_the_same_seeds_give_the_same_transcripts_in_another_process() -> None:
    code = (
        "from simulation.run import simulate; from simulation.drawing import draw_scenario; "
        "runs = [simulate(draw_scenario(seed), is_verbose=True) for seed in (3, 17, 13, 19, 31, 39, 62, 79)]; "
        "print('\\f'.join('\\n'.join(run.lines) for run in runs))"
    )
    told = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
        for _ in range(2)
    ]
    assert told[0] == told[1]
    assert ["grant of H1" in transcript for transcript in told[0].split("\f")][:2] == [True, True]
