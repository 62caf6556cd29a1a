"""What one simulated run consists of: nodes, requests and faults, all drawn from one seed.

A scenario is a plain value, so that a failing one can be made smaller by leaving requests and faults out. It knows no
time but its own: seconds since the start of the world.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

from cache_runtime.transfer.engine import PlaneKind
from simulation.model import CONTEXT_TOKENS, VOCAB_SIZE, ModelKind
from simulation.network import HANDOFF_MEDDLINGS, Meddling
from simulation.settings import ComputeSettings

# Everybody is up and knows everybody by then.
BEGIN_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One client. `cancel_after_s` None: it stays to the end."""

    request_id: str
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    timeout_s: float
    cancel_after_s: float | None = None

    def __str__(self) -> str:
        leaves = "" if self.cancel_after_s is None else f", leaves after {self.cancel_after_s:.3f} s"
        return (
            f"{self.at_s:.3f} s: {self.request_id}, {len(self.prompt)} prompt tokens, {self.max_tokens} to generate, "
            f"deadline {self.timeout_s:.1f} s{leaves}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A process dies; `silently`: its machine does. It is started again after a while."""

    host: str
    at_s: float
    restart_after_s: float
    silently: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A process is stopped and goes on later."""

    host: str
    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A node is told to stop in good order, and is started again some time after it has."""

    host: str
    at_s: float
    restart_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Nothing gets from `source` to `target`; `is_mutual`: nor back."""

    source: str
    target: str
    at_s: float
    for_s: float
    control: bool
    data: bool
    is_mutual: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A host answers, computes and moves bytes slowly for a while."""

    host: str
    at_s: float
    for_s: float
    control_s: float
    data_s: float
    compute_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeddleWith:
    """Something happens to `num_frames` frames, from the `nth` (from 0) on, that go from `source` to `target` after
    `at_s`; for faults of handoff messages only those are counted.
    """

    source: str
    target: str
    at_s: float
    nth: int
    num_frames: int
    kind: Meddling
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseRun:
    """The `nth` run that is posted from `source` to `target` after `at_s` never lands."""

    source: str
    target: str
    at_s: float
    nth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipBit:
    """The `nth` run that lands on `target` from `source` after `at_s` arrives with one wrong bit."""

    source: str
    target: str
    at_s: float
    nth: int


Fault: TypeAlias = Kill | Stop | Drain | Partition | Slow | MeddleWith | LoseRun | FlipBit


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How slow the whole mesh is: extra seconds of latency, extra seconds of a write's landing, factor of computing."""

    control_s: float
    data_s: float
    compute_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`faults` are over, and every host is up again, at `heal_s`."""

    seed: int
    plane: PlaneKind
    pace: Pace
    prefill: tuple[ComputeSettings, ...]
    decode: tuple[ComputeSettings, ...]
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]

    @property
    def kind(self) -> ModelKind:
        """What all nodes run."""
        return self.decode[0].kind

    @property
    def prefill_names(self) -> tuple[str, ...]:
        return tuple(f"prefill-{index}" for index in range(1, len(self.prefill) + 1))

    @property
    def decode_names(self) -> tuple[str, ...]:
        return tuple(f"decode-{index}" for index in range(1, len(self.decode) + 1))

    @property
    def touched(self) -> frozenset[str]:
        """Every host that a fault concerns."""
        names: set[str] = set()
        for fault in self.faults:
            match fault:
                case Kill() | Stop() | Drain() | Slow():
                    names.add(fault.host)
                case Partition() | MeddleWith() | LoseRun() | FlipBit():
                    names |= {fault.source, fault.target}
        return frozenset(names)

    @property
    def heal_s(self) -> float:
        """No fault begins or lasts after it."""
        ends = [BEGIN_S, *(request.at_s + 1.0 for request in self.requests)]
        for fault in self.faults:
            match fault:
                case Kill():
                    ends.append(fault.at_s + fault.restart_after_s)
                case Stop() | Partition() | Slow():
                    ends.append(fault.at_s + fault.for_s)
                case Drain() | MeddleWith() | LoseRun() | FlipBit():
                    ends.append(fault.at_s)
        return max(ends)

    def describe(self) -> tuple[str, ...]:
        sizes = ", ".join(
            f"{name} with {item.num_lcm_blocks} LCM blocks"
            for name, item in zip((*self.prefill_names, *self.decode_names), (*self.prefill, *self.decode), strict=True)
        )
        return (
            f"seed {self.seed}: model {self.kind.value}, {self.plane.value} data plane, {sizes}",
            f"  {self.pace}",
            *(f"  request {request}" for request in self.requests),
            *(f"  fault {fault}" for fault in self.faults),
        )


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = Random(seed)
    kind = rng.choice(tuple(ModelKind))
    num_prefill, num_decode = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2)))
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
        requests=_draw_requests(rng, rng.choice((2, 3, 4, 6, 8))),
        faults=(),
    )
    faults = tuple(_draw_fault(rng, calm) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))))
    return replace(calm, faults=faults)


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
        _draw_settings(rng, kind, (18, 24, 40)),
        lease_s=rng.choice((0.4, 4.0)),
        verifies=rng.random() < 0.5,
        prefills_locally=rng.random() < 0.2,
        max_local_prefill_tokens=rng.choice((0, 0, 5)),
    )


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
                max_tokens=min(rng.choice((1, 2, 4, 8, 12)), CONTEXT_TOKENS - len(prompt)),
                seed=rng.randrange(1 << 32),
                timeout_s=rng.choice((0.05, 1.0, 5.0, 15.0, 30.0)),
                cancel_after_s=rng.random() * 0.1 if rng.random() < 0.2 else None,
            )
        )
    return tuple(requests)


def _draw_fault(rng: Random, calm: Scenario) -> Fault:
    """One fault, at a time when somebody is served."""
    busy_s = 0.03 + calm.pace.data_s + 0.005 * calm.pace.compute_factor
    at_s = rng.choice(calm.requests).at_s + rng.random() * busy_s
    prefill, decode = rng.choice(calm.prefill_names), rng.choice(calm.decode_names)
    host = rng.choice((prefill, prefill, decode, decode, decode, "router"))
    source, target = rng.choice(((prefill, decode), (decode, prefill)))
    match rng.randrange(15):
        case 0 | 1:
            return Kill(host=host, at_s=at_s, restart_after_s=rng.choice((0.02, 0.5, 4.0)), silently=rng.random() < 0.2)
        case 2 | 3 | 4:
            return Stop(host=rng.choice((prefill, host)), at_s=at_s, for_s=rng.choice((0.02, 3.0, 9.0, 25.0)))
        case 5 | 6 | 7:
            return _draw_partition(rng, rng.choice(((source, target), (source, target), ("router", decode))), at_s)
        case 8:
            return Slow(
                host=host,
                at_s=at_s,
                for_s=rng.choice((0.1, 2.0)),
                control_s=rng.choice((0.0, 0.02, 0.5)),
                data_s=rng.choice((0.0, 0.05, 1.5)),
                compute_factor=rng.choice((1.0, 20.0)),
            )
        case 9:
            drained = rng.choice((prefill, decode))
            return Drain(host=drained, at_s=at_s, restart_after_s=rng.choice((0.05, 1.0)))
        case 10:
            # Without checksums nobody can notice.
            verifies = dict(zip(calm.decode_names, calm.decode, strict=True))[decode].verifies
            made = FlipBit if verifies and rng.random() < 0.7 else LoseRun
            return made(source=prefill, target=decode, at_s=at_s, nth=rng.randrange(12))
        case _:
            return _draw_meddling(rng, source, target, at_s)


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
