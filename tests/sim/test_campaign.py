"""A failing seed is explained: findings, the smallest scenario that still fails, and its transcript."""

from __future__ import annotations

import pytest
from sim.planted import free_on_cancel, send_no_states
from typer.testing import CliRunner

from pdmesh_cli.main import app
from simulation.campaign import Tally, explain, run_campaign, run_seed
from simulation.drawing import draw_scenario
from simulation.minimise import minimise


def test_a_failing_scenario_is_made_as_small_as_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    send_no_states(monkeypatch)
    outcome = run_seed(2)
    smallest = minimise(outcome)
    assert len(outcome.scenario.requests) > 1
    assert len(smallest.scenario.requests) == 1
    assert smallest.scenario.faults == ()
    assert outcome.findings[0].kind in smallest.kinds()


def test_a_finding_is_told_with_what_led_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    free_on_cancel(monkeypatch)
    text = explain(next(outcome for outcome in map(run_seed, range(20)) if outcome.findings))
    for part in ("findings", "smallest scenario", "grant of H1", "abort of H", "FINDING    stray write"):
        assert part in text


def test_a_scenario_is_a_function_of_its_seed() -> None:
    assert draw_scenario(7) == draw_scenario(7)
    assert draw_scenario(7) != draw_scenario(8)


def test_a_campaign_stops_after_enough_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    send_no_states(monkeypatch)
    said: list[str] = []
    tally = run_campaign(0, num_runs=50, duration_s=None, num_jobs=1, max_failures=2, say=said.append)
    assert len(tally.failed_seeds) == len(said) == 2
    assert tally.num_runs < 50


def test_a_campaign_stops_when_its_time_is_over() -> None:
    times = iter(range(1000))
    tally = run_campaign(
        0, num_runs=None, duration_s=5.0, num_jobs=1, max_failures=1, say=print, clock=lambda: float(next(times))
    )
    assert tally.num_runs == 5


def test_a_campaign_tells_what_happened_how_often_and_in_how_many_runs() -> None:
    tally = Tally()
    for seed in (4, 11):
        tally.add(run_seed(seed))
    table = {line[:30].strip(): line[30:].split() for line in tally.describe_seen().splitlines()}
    assert table["what happened"] == ["times", "runs"]
    for name, num_times in tally.seen.items():
        share = {1: "50.0%", 2: "100.0%"}[tally.seen_in_runs[name]]
        assert table[name] == [str(num_times), share]
    assert any(name.startswith("fault: ") for name in table)


def test_the_command_fails_on_a_finding_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = CliRunner().invoke(app, ["sim", "--seed", "0", "--runs", "2"])
    assert (calm.exit_code, "2 runs, 0 with findings" in calm.stdout) == (0, True)
    assert "what happened" in calm.stdout
    told = CliRunner().invoke(app, ["sim", "--seed", "0", "--transcript"])
    assert (told.exit_code, "all faults are over" in told.stdout) == (0, True)
    send_no_states(monkeypatch)
    broken = CliRunner().invoke(app, ["sim", "--seed", "0", "--runs", "2", "--max-failures", "1"])
    assert (broken.exit_code, "smallest scenario" in broken.stdout) == (1, True)
