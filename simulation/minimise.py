"""Makes a failing scenario smaller: fewer faults, requests and nodes, shorter answers, the same kind of finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simulation.run import Outcome, simulate
from simulation.scenario import Request, Scenario
from simulation.settings import PLAIN_ROUTER, ComputeSettings

_MAX_RUNS = 120


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
    """The scenario without one of its parts, each in turn; at least one request stays, and nodes that can serve it."""
    for index in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:index] + scenario.faults[index + 1 :])
    if len(scenario.requests) > 1:
        for index in range(len(scenario.requests)):
            yield replace(scenario, requests=scenario.requests[:index] + scenario.requests[index + 1 :])
    yield from _without_nodes(scenario)
    yield from _plainer(scenario)
    for index, request in enumerate(scenario.requests):
        for simpler in _simpler(request):
            yield replace(scenario, requests=(*scenario.requests[:index], simpler, *scenario.requests[index + 1 :]))


def _without_nodes(scenario: Scenario) -> Iterator[Scenario]:
    """Without the last node of a role, unless a fault concerns it: the others keep their names."""
    touched = scenario.touched
    if scenario.fused and scenario.fused_names[-1] not in touched and (scenario.decode or len(scenario.fused) > 1):
        yield replace(scenario, fused=scenario.fused[:-1])
    for role, names in (("prefill", scenario.prefill_names), ("decode", scenario.decode_names)):
        if len(names) > 1 and names[-1] not in touched:
            kept = scenario.prefill[:-1] if role == "prefill" else scenario.decode[:-1]
            yield replace(scenario, prefill=kept) if role == "prefill" else replace(scenario, decode=kept)
    pair = {*scenario.prefill_names, *scenario.decode_names}
    if pair and scenario.fused and not pair & touched:
        yield replace(scenario, prefill=(), decode=())


def _plainer(scenario: Scenario) -> Iterator[Scenario]:
    """With a router of fewer traits, without tenants, or with nodes of one tensor rank."""
    router = scenario.router
    for plainer in (
        replace(PLAIN_ROUTER, has_tenants=router.has_tenants),
        replace(router, hedge_after_s=0.0, hedge_percentile=0.0),
        replace(router, follow_interval_s=0.0),
    ):
        if plainer != router:
            yield replace(scenario, router=plainer)
    if router.has_tenants:
        anybody = tuple(replace(request, tenant="") for request in scenario.requests)
        yield replace(scenario, router=replace(router, has_tenants=False), requests=anybody)
    single = replace(scenario, prefill=_of_one_rank(scenario.prefill), decode=_of_one_rank(scenario.decode))
    if single != scenario:
        yield single


def _of_one_rank(nodes: tuple[ComputeSettings, ...]) -> tuple[ComputeSettings, ...]:
    return tuple(replace(settings, num_tensor_ranks=1) for settings in nodes)


def _simpler(request: Request) -> Iterator[Request]:
    if request.cancel_after_s is not None:
        yield replace(request, cancel_after_s=None)
    if request.num_samples > 1:
        yield replace(request, num_samples=1)
    if request.max_tokens > 1:
        yield replace(request, max_tokens=max(1, request.max_tokens // 2))
    if len(request.prompt) > 1:
        yield replace(request, prompt=request.prompt[: len(request.prompt) // 2])
