"""Draws scenarios in which something happens that seldom comes about by chance: hedges, streams that go on elsewhere,
and nodes that are left because they say nothing.

There are two nodes of each role that there are, and whoever asks is patient and wants a long answer.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TypeVar

from router_node.placement_policy import PolicyName
from simulation.faults import Hang, Kill
from simulation.model import CONTEXT_TOKENS
from simulation.scenario import Pace, Scenario

SettingsT = TypeVar("SettingsT")

# Few and no longer than it takes: a scenario must not cost more than others.
_MAX_REQUESTS = 3
_LONGEST_TOKENS = (6, 12)


def draw_pointed(rng: Random, calm: Scenario) -> Scenario:
    """One with the nodes and requests of `calm`, which has no faults."""
    calm = with_rivals(rng, calm)
    return rng.choice((draw_hedges, draw_lost_stream, draw_silence))(rng, calm)


def with_rivals(rng: Random, calm: Scenario) -> Scenario:
    """`calm` with two nodes of each role that it has, and few requests, which are patient and want long answers."""
    return replace(
        calm,
        pace=Pace(control_s=0.0, data_s=rng.choice((0.0, 0.02, 0.3)), compute_factor=rng.choice((5.0, 5.0, 20.0))),
        prefill=_pair(calm.prefill),
        decode=_pair(calm.decode),
        fused=calm.fused if calm.decode else _pair(calm.fused),
        requests=tuple(
            replace(
                request,
                max_tokens=min(rng.choice(_LONGEST_TOKENS), CONTEXT_TOKENS - len(request.prompt)),
                timeout_s=rng.choice((15.0, 30.0)),
                cancel_after_s=None,
            )
            for request in calm.requests[:_MAX_REQUESTS]
        ),
    )


def _pair(settings: tuple[SettingsT, ...]) -> tuple[SettingsT, ...]:
    return settings * 2 if len(settings) == 1 else settings


def draw_hedges(rng: Random, calm: Scenario) -> Scenario:
    """First tokens that take longer than the router waits, on nodes that are well."""
    policy: PolicyName = rng.choice(("least_loaded", "cache_aware", "round_robin"))
    after_s = rng.choice((0.01, 0.03, 0.1))
    return replace(calm, router=replace(calm.router, placement_policy=policy, hedge_after_s=after_s))


def draw_lost_stream(rng: Random, calm: Scenario) -> Scenario:
    """A node dies that generates, as a rule."""
    host, at_s = rng.choice(_generating(calm)), _draw_late_moment(rng, calm)
    kill = Kill(host=host, at_s=at_s, restart_after_s=rng.choice((0.5, 4.0)), silently=rng.random() < 0.2)
    return replace(calm, faults=(kill,))


def draw_silence(rng: Random, calm: Scenario) -> Scenario:
    """The engine of a node hangs behind a connection that lives, for longer than the router bears it."""
    hang = Hang(host=rng.choice(_generating(calm)), at_s=_draw_late_moment(rng, calm), for_s=33.0)
    return replace(calm, router=replace(calm.router, silence_timeout_s=1.0), faults=(hang,))


def _generating(calm: Scenario) -> tuple[str, ...]:
    return (*calm.decode_names, *calm.fused_names)


def _draw_late_moment(rng: Random, calm: Scenario) -> float:
    """A time at which somebody gets tokens, as a rule: behind a prompt and its transfer, before an answer's end."""
    first_s = 0.02 + calm.pace.data_s / 2 + 0.005 * calm.pace.compute_factor
    return rng.choice(calm.requests).at_s + first_s + rng.random() * 0.02 * calm.pace.compute_factor
