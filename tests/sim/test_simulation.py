"""Whole meshes in virtual time: known seeds, fresh ones, and that a run is a function of its seed."""

from __future__ import annotations

import secrets
import subprocess
import sys
from dataclasses import replace

import pytest

from simulation.campaign import explain, run_seed
from simulation.run import simulate
from simulation.scenario import draw_scenario

NUM_FIXED_SEEDS = 60
NUM_FRESH_SEEDS = 40


def test_no_known_seed_breaks_a_promise() -> None:
    for seed in range(NUM_FIXED_SEEDS):
        outcome = run_seed(seed)
        assert not outcome.findings, explain(outcome)


def test_no_fresh_seed_breaks_a_promise() -> None:
    first = secrets.randbits(31)
    for seed in range(first, first + NUM_FRESH_SEEDS):
        outcome = run_seed(seed)
        assert not outcome.findings, explain(outcome)


def test_every_request_is_answered_when_nothing_fails() -> None:
    for seed in range(8):
        scenario = draw_scenario(seed)
        patient = tuple(replace(item, timeout_s=15.0, cancel_after_s=None, max_tokens=3) for item in scenario.requests)
        outcome = simulate(replace(scenario, faults=(), requests=patient))
        assert not outcome.findings, explain(outcome)
        assert set(outcome.statuses) == {"OK"}


@pytest.mark.parametrize("seed", [3, 17])
def test_the_same_seed_gives_the_same_transcript_in_another_process(seed: int) -> None:
    code = (
        "from simulation.run import simulate; from simulation.scenario import draw_scenario; "
        f"print('\\n'.join(simulate(draw_scenario({seed}), is_verbose=True).lines))"
    )
    told = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
        for _ in range(2)
    ]
    assert told[0] == told[1]
    assert "grant of H1" in told[0]
