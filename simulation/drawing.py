"""Draws the scenario of a seed: a small mesh, some requests, and faults at moments at which somebody is served."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from cache_runtime.transfer.engine import PlaneKind
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
from simulation.model import CONTEXT_TOKENS, VOCAB_SIZE, ModelKind
from simulation.network import HANDOFF_MEDDLINGS, Meddling
from simulation.pointed import draw_pointed
from simulation.scenario import BEGIN_S, ROUTER, Pace, Request, Scenario
from simulation.settings import ComputeSettings, RouterSettings
from simulation.tenants import LIMITS, ROOMY

# Nodes of the roles prefill, decode and fused.
_MESHES = (
    (1, 1, 0),
    (1, 1, 0),
    (1, 1, 0),
    (2, 1, 0),
    (2, 1, 0),
    (1, 2, 0),
    (1, 2, 0),
    (2, 2, 0),
    (2, 2, 0),
    (1, 1, 1),
    (0, 0, 1),
    (0, 0, 2),
)

# How many scenarios have each of the options that most leave alone, a crowd of requests, tenants, an engine that hangs.
_OPTION_SHARE = 0.2
_SAMPLES_SHARE = 0.12
_CROWD_SHARE = 0.006
_TENANTS_SHARE = 0.1
_HANG_SHARE = 0.04
# How many scenarios are about one of the things that seldom come about by chance.
_POINTED_SHARE = 0.1
_NUM_CROWD = 38
_FAST = Pace(control_s=0.0, data_s=0.0, compute_factor=1.0)


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = Random(seed)
    kind = rng.choice(tuple(ModelKind))
    num_prefill, num_decode, num_fused = rng.choice(_MESHES)
    pace = Pace(
        control_s=rng.choice((0.0, 0.0, 0.02)),
        data_s=rng.choice((0.0, 0.02, 0.3)),
        compute_factor=rng.choice((1.0, 5.0, 40.0)),
    )
    calm = Scenario(
        seed=seed,
        plane=rng.choice((PlaneKind.ONE_SIDED, PlaneKind.ONE_SIDED, PlaneKind.TWO_SIDED)),
        pace=pace,
        prefill=tuple(_draw_settings(rng, kind, (24, 40, 64)) for _ in range(num_prefill)),
        decode=tuple(_draw_decode_settings(rng, kind) for _ in range(num_decode)),
        fused=tuple(_draw_fused_settings(rng, kind) for _ in range(num_fused)),
        requests=_draw_requests(rng, rng.choice((2, 3, 4, 6, 8))),
        faults=(),
    )
    pointed = Random(f"{seed}/purpose")
    if pointed.random() < _POINTED_SHARE:
        return draw_pointed(pointed, calm)
    # Of a source of its own: whether there are any changes nothing else.
    options = Random(f"{seed}/options")
    calm = _draw_options(options, calm)
    if rng.random() < 0.05:
        return replace(calm, faults=(_draw_rolling_restart(rng, calm),))
    if options.random() < _HANG_SHARE:
        return replace(calm, faults=(_draw_hang(options, calm),))
    faults = tuple(_draw_fault(rng, calm) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))))
    return replace(calm, faults=(*faults, *_draw_faults_of_options(options, calm)))


def _draw_options(rng: Random, calm: Scenario) -> Scenario:
    """What most scenarios leave as it is."""
    if rng.random() < _OPTION_SHARE:
        calm = replace(calm, router=_draw_router_settings(rng))
    if rng.random() < _SAMPLES_SHARE:
        # Twice the work, so not on the slowest nodes: who is patient must get an answer.
        pace = replace(calm.pace, compute_factor=min(calm.pace.compute_factor, 5.0))
        requests = tuple(replace(item, num_samples=rng.choice((1, 2, 3))) for item in calm.requests)
        calm = replace(calm, pace=pace, requests=requests)
    if calm.decode and rng.random() < _OPTION_SHARE:
        calm = replace(
            calm,
            prefill=tuple(replace(item, num_tensor_ranks=rng.choice((1, 2))) for item in calm.prefill),
            decode=tuple(replace(item, num_tensor_ranks=rng.choice((1, 2))) for item in calm.decode),
        )
    if rng.random() < _CROWD_SHARE:
        calm = _draw_crowd(rng, calm)
    if rng.random() < _TENANTS_SHARE:
        requests = tuple(replace(item, tenant=rng.choice((ROOMY, *LIMITS))) for item in calm.requests)
        calm = replace(calm, router=replace(calm.router, has_tenants=True), requests=requests)
    return calm


def _draw_router_settings(rng: Random) -> RouterSettings:
    return RouterSettings(
        placement_policy=rng.choice(("cache_aware", "cache_aware", "cache_aware", "round_robin", "pinned")),
        follow_interval_s=rng.choice((0.0, 0.05, 0.25)),
        hedge_after_s=rng.choice((0.0, 0.01, 0.05, 0.3)),
        silence_timeout_s=rng.choice((1.0, 8.0)),
    )


def _draw_crowd(rng: Random, calm: Scenario) -> Scenario:
    """So many short requests that the router knows what is late, and hedges it."""
    router = replace(calm.router, hedge_after_s=0.0, hedge_percentile=rng.choice((0.5, 0.9)))
    crowd = tuple(
        replace(
            rng.choice(calm.requests),
            request_id=f"r{number}",
            at_s=BEGIN_S + 0.02 * number,
            max_tokens=rng.choice((1, 2)),
            seed=rng.randrange(1 << 32),
            num_samples=1,
        )
        for number in range(1, _NUM_CROWD + 1)
    )
    return replace(calm, pace=_FAST, router=router, requests=crowd)


def _draw_faults_of_options(rng: Random, calm: Scenario) -> tuple[Fault, ...]:
    """Such as concern what is optional."""
    faults: list[Fault] = []
    at_s = _draw_busy_moment(rng, calm)
    mirrored = [
        name
        for name, settings in zip(calm.compute_names, (*calm.prefill, *calm.decode), strict=False)
        if settings.num_tensor_ranks > 1
    ]
    if mirrored and rng.random() < 0.7:
        faults.append(_draw_fault_of_rank(rng, rng.choice(mirrored), at_s))
    if calm.router.follows and rng.random() < 0.7:
        faults.append(_draw_fault_of_follower(rng, rng.choice(calm.compute_names), at_s))
    return tuple(faults)


def _draw_settings(rng: Random, kind: ModelKind, num_lcm_blocks: tuple[int, ...]) -> ComputeSettings:
    return ComputeSettings(
        kind=kind,
        num_lcm_blocks=rng.choice(num_lcm_blocks),
        max_batch_size=rng.choice((2, 4, 8)),
        token_budget=rng.choice((8, 8, 16, 32)),
        max_ready_ungranted=rng.choice((1, 2, 8)),
    )


def _draw_decode_settings(rng: Random, kind: ModelKind) -> ComputeSettings:
    return replace(
        _draw_generating_settings(rng, kind),
        lease_s=rng.choice((0.4, 4.0)),
        verifies=rng.random() < 0.5,
        prefills_locally=rng.random() < 0.2,
        max_local_prefill_tokens=rng.choice((0, 0, 5)),
    )


def _draw_fused_settings(rng: Random, kind: ModelKind) -> ComputeSettings:
    return replace(_draw_generating_settings(rng, kind), num_tensor_ranks=rng.choice((1, 2, 2)))


def _draw_generating_settings(rng: Random, kind: ModelKind) -> ComputeSettings:
    if rng.random() < 0.3:
        return replace(_draw_settings(rng, kind, (14, 18, 24)), is_overcommitted=True)
    return _draw_settings(rng, kind, (18, 24, 40))


def _draw_requests(rng: Random, num_requests: int) -> tuple[Request, ...]:
    stems = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(24)) for _ in range(2)]
    span_s = rng.choice((0.02, 0.1, 0.5))
    requests = []
    for number in range(1, num_requests + 1):
        stem = rng.choice(stems)[: rng.choice((0, 4, 8, 13, 24))]
        tail = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 3, 7, 12))))
        prompt = (*stem, *tail)
        requests.append(
            Request(
                request_id=f"r{number}",
                at_s=BEGIN_S + rng.random() * span_s,
                prompt=prompt,
                max_tokens=min(rng.choice((1, 2, 4, 8, 12, 20)), CONTEXT_TOKENS - len(prompt)),
                seed=rng.randrange(1 << 32),
                timeout_s=rng.choice((0.05, 1.0, 5.0, 15.0, 30.0)),
                cancel_after_s=rng.random() * 0.1 if rng.random() < 0.2 else None,
            )
        )
    return tuple(requests)


def _draw_busy_moment(rng: Random, calm: Scenario) -> float:
    """A time at which somebody is served, as a rule."""
    busy_s = 0.03 + calm.pace.data_s + 0.005 * calm.pace.compute_factor
    return rng.choice(calm.requests).at_s + rng.random() * busy_s


def _draw_rolling_restart(rng: Random, calm: Scenario) -> Fault:
    """By itself: whatever else happens would excuse what it must not do."""
    return RollingRestart(
        hosts=tuple(rng.sample(calm.compute_names, len(calm.compute_names))),
        at_s=_draw_busy_moment(rng, calm),
        restart_after_s=rng.choice((0.05, 0.5)),
        pause_s=rng.choice((1.5, 3.0)),
        asking=rng.choice(tuple(Asking)),
    )


def _draw_hang(rng: Random, calm: Scenario) -> Hang:
    """By itself, so that there is a node to go to, and as a rule for longer than anybody waits."""
    at_s = _draw_busy_moment(rng, calm)
    return Hang(host=rng.choice(calm.compute_names), at_s=at_s, for_s=rng.choice((3.0, 33.0, 33.0)))


def _draw_fault(rng: Random, calm: Scenario) -> Fault:
    at_s = _draw_busy_moment(rng, calm)
    if calm.fused and (not calm.decode or rng.random() < 0.4):
        return _draw_fault_of_fused(rng, calm, at_s)
    prefill, decode = rng.choice(calm.prefill_names), rng.choice(calm.decode_names)
    host = rng.choice((prefill, prefill, decode, decode, decode, ROUTER))
    source, target = rng.choice(((prefill, decode), (decode, prefill)))
    match rng.randrange(16):
        case 0 | 1:
            return _draw_kill(rng, host, at_s)
        case 2 | 3 | 4:
            return _draw_stop(rng, rng.choice((prefill, host)), at_s)
        case 5 | 6 | 7:
            return _draw_partition(rng, rng.choice(((source, target), (source, target), (ROUTER, decode))), at_s)
        case 8:
            return _draw_slow(rng, host, at_s)
        case 9:
            return _draw_drain(rng, rng.choice((prefill, decode, host)), at_s)
        case 10:
            # Without checksums nobody can notice.
            verifies = dict(zip(calm.decode_names, calm.decode, strict=True))[decode].verifies
            made = FlipBit if verifies and rng.random() < 0.7 else LoseRun
            return made(source=prefill, target=decode, at_s=at_s, nth=rng.randrange(12))
        case 11:
            return _draw_clear(rng, rng.choice((prefill, decode)), at_s)
        case _:
            return _draw_meddling(rng, source, target, at_s)


def _draw_fault_of_fused(rng: Random, calm: Scenario, at_s: float) -> Fault:
    fused = rng.choice(calm.fused_names)
    host = rng.choice((fused, fused, ROUTER))
    has_ranks = dict(zip(calm.fused_names, calm.fused, strict=True))[fused].num_tensor_ranks > 1
    match rng.randrange(12 if has_ranks else 8):
        case 0 | 1:
            return _draw_kill(rng, host, at_s)
        case 2:
            return _draw_stop(rng, host, at_s)
        case 3:
            return _draw_partition(rng, (ROUTER, fused), at_s)
        case 4:
            return _draw_slow(rng, host, at_s)
        case 5:
            return _draw_drain(rng, host, at_s)
        case 6:
            return _draw_clear(rng, fused, at_s)
        case 7:
            return _draw_meddling(rng, *rng.choice(((ROUTER, fused), (fused, ROUTER))), at_s)
        case 8 | 9:
            return _draw_kill_of_rank(rng, fused, at_s)
        case _:
            return _draw_lateness_of_rank(rng, fused, at_s)


def _draw_fault_of_rank(rng: Random, host: str, at_s: float) -> Fault:
    return rng.choice((_draw_kill_of_rank, _draw_lateness_of_rank))(rng, host, at_s)


def _draw_kill_of_rank(rng: Random, host: str, at_s: float) -> KillRank:
    return KillRank(host=host, at_s=at_s, restart_after_s=rng.choice((0.02, 0.5)))


def _draw_lateness_of_rank(rng: Random, host: str, at_s: float) -> LateRank:
    return LateRank(host=host, at_s=at_s, for_s=rng.choice((0.1, 2.0)), seconds=rng.choice((0.01, 0.2)))


def _draw_kill(rng: Random, host: str, at_s: float) -> Kill:
    return Kill(host=host, at_s=at_s, restart_after_s=rng.choice((0.02, 0.5, 4.0)), silently=rng.random() < 0.2)


def _draw_stop(rng: Random, host: str, at_s: float) -> Stop:
    return Stop(host=host, at_s=at_s, for_s=rng.choice((0.02, 3.0, 9.0, 25.0)))


def _draw_slow(rng: Random, host: str, at_s: float) -> Slow:
    return Slow(
        host=host,
        at_s=at_s,
        for_s=rng.choice((0.1, 2.0)),
        control_s=rng.choice((0.0, 0.02, 0.5)),
        data_s=rng.choice((0.0, 0.05, 1.5)),
        compute_factor=rng.choice((1.0, 20.0)),
    )


def _draw_drain(rng: Random, host: str, at_s: float) -> Drain:
    return Drain(host=host, at_s=at_s, restart_after_s=rng.choice((0.05, 1.0)), asking=rng.choice(tuple(Asking)))


def _draw_clear(rng: Random, host: str, at_s: float) -> ClearCache:
    """While somebody is served, when it is refused, or when all is done."""
    return ClearCache(host=host, at_s=at_s + rng.choice((0.0, 1.0)))


def _draw_partition(rng: Random, ends: tuple[str, str], at_s: float) -> Partition:
    source, target = ends if rng.random() < 0.5 else ends[::-1]
    control, data = rng.choice(((True, False), (False, True), (True, True)))
    return Partition(
        source=source,
        target=target,
        at_s=at_s,
        for_s=rng.choice((0.05, 2.0, 12.0)),
        control=control,
        data=data,
        is_mutual=rng.random() < 0.5,
    )


def _draw_meddling(rng: Random, source: str, target: str, at_s: float) -> MeddleWith:
    kind = rng.choice(tuple(Meddling))
    concerns_handoffs = kind in HANDOFF_MEDDLINGS
    return MeddleWith(
        source=source,
        target=target,
        at_s=at_s,
        nth=rng.randrange(4 if concerns_handoffs else 8),
        num_frames=rng.choice((1, 3, 8)) if concerns_handoffs else 1,
        kind=kind,
        seconds=rng.choice((0.01, 0.3, 3.0)) if kind is Meddling.DELAY else 0.0,
    )


def _draw_fault_of_follower(rng: Random, node: str, at_s: float) -> Fault:
    """What makes the router believe something of a node that is so no more."""
    source, target = rng.choice(((ROUTER, node), (node, ROUTER)))
    match rng.randrange(4):
        case 0:
            return _draw_partition(rng, (source, target), at_s)
        case 1:
            return _draw_kill(rng, node, at_s)
        case 2:
            return _draw_clear(rng, node, at_s)
        case _:
            nth = rng.randrange(12)
            return MeddleWith(source=source, target=target, at_s=at_s, nth=nth, num_frames=1, kind=Meddling.BREAK)
