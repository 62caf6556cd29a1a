"""Makes a failing scenario smaller: fewer requests and faults, the same kind of finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simulation.run import Outcome, simulate
from simulation.scenario import Scenario

_MAX_RUNS = 200


def minimise(outcome: Outcome) -> Outcome:
    """An outcome of a smaller scenario with a finding of the same kind as the first one; at worst the same again."""
    kind = outcome.findings[0].kind
    num_runs = 0
    is_smaller = True
    while is_smaller and num_runs < _MAX_RUNS:
        is_smaller = False
        for scenario in _smaller(outcome.scenario):
            num_runs += 1
            tried = simulate(scenario)
            if kind in tried.kinds():
                outcome, is_smaller = tried, True
                break
            if num_runs >= _MAX_RUNS:
                break
    return outcome


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario without one of its parts, each in turn; at least one request stays."""
    for index in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:index] + scenario.faults[index + 1 :])
    if len(scenario.requests) > 1:
        for index in range(len(scenario.requests)):
            yield replace(scenario, requests=scenario.requests[:index] + scenario.requests[index + 1 :])
