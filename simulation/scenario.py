"""What one simulated run consists of: nodes, requests and faults.

A scenario is a plain value, so that a failing one can be made smaller by leaving parts of it out. It knows no time but
its own: seconds since the start of the world.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_runtime.transfer.engine import PlaneKind
from simulation.faults import ClearCache, Drain, Fault, RollingRestart, end_of, hosts_of
from simulation.model import ModelKind
from simulation.settings import PLAIN_ROUTER, ComputeSettings, RouterSettings

# Everybody is up and knows everybody by then.
BEGIN_S = 3.0
ROUTER = "router"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One client, which wants `num_samples` answers. `cancel_after_s` None: it stays to the end."""

    request_id: str
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    timeout_s: float
    cancel_after_s: float | None = None
    num_samples: int = 1
    # Whose it is, where the router tells clients apart.
    tenant: str = ""

    def __str__(self) -> str:
        leaves = "" if self.cancel_after_s is None else f", leaves after {self.cancel_after_s:.3f} s"
        samples = "" if self.num_samples == 1 else f" {self.num_samples} times"
        whose = f" for {self.tenant}" if self.tenant else ""
        wanted = f"{len(self.prompt)} prompt tokens, {self.max_tokens} to generate{samples}"
        return f"{self.request_id}{whose}: {wanted}, deadline after {self.timeout_s:g} s{leaves}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How slow the whole mesh is: extra seconds of latency, extra seconds of a write's landing, factor of computing."""

    control_s: float
    data_s: float
    compute_factor: float

    def __str__(self) -> str:
        return (
            f"messages up to {2 + self.control_s * 1000:g} ms, writes up to {4 + self.data_s * 1000:g} ms, "
            f"a layer up to {0.8 * self.compute_factor:g} ms"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`faults` are over, and every host is up again, at `heal_s`; what operators do may take longer."""

    seed: int
    plane: PlaneKind
    pace: Pace
    prefill: tuple[ComputeSettings, ...]
    decode: tuple[ComputeSettings, ...]
    fused: tuple[ComputeSettings, ...] = ()
    router: RouterSettings = PLAIN_ROUTER
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]

    @property
    def kind(self) -> ModelKind:
        """What all nodes run."""
        return (*self.decode, *self.fused)[0].kind

    @property
    def prefill_names(self) -> tuple[str, ...]:
        return _names("prefill", len(self.prefill))

    @property
    def decode_names(self) -> tuple[str, ...]:
        return _names("decode", len(self.decode))

    @property
    def fused_names(self) -> tuple[str, ...]:
        return _names("fused", len(self.fused))

    @property
    def compute_names(self) -> tuple[str, ...]:
        return (*self.prefill_names, *self.decode_names, *self.fused_names)

    @property
    def touched(self) -> frozenset[str]:
        """Every host that a fault concerns."""
        return frozenset().union(*map(hosts_of, self.faults))

    @property
    def is_only_drained(self) -> bool:
        """Whether nothing happens but that one node at a time is told to leave, and caches are cleared."""
        drains = [fault for fault in self.faults if isinstance(fault, Drain | RollingRestart)]
        others = [fault for fault in self.faults if not isinstance(fault, Drain | RollingRestart | ClearCache)]
        return len(drains) == 1 and not others

    @property
    def heal_s(self) -> float:
        """No fault begins or lasts after it."""
        ends = [BEGIN_S, *(request.at_s + 1.0 for request in self.requests)]
        return max((*ends, *map(end_of, self.faults)))

    def describe(self) -> tuple[str, ...]:
        """What there is and what will happen, for people."""
        settings = zip(self.compute_names, (*self.prefill, *self.decode, *self.fused), strict=True)
        return (
            f"seed {self.seed}: model {self.kind.value}, {self.plane.value} data plane",
            f"  {self.pace}",
            f"  {ROUTER}: {self.router}",
            *(f"  {name}: {item}" for name, item in settings),
            *(f"  {request.at_s:.3f} s: {request}" for request in self.requests),
            *(f"  {fault.at_s:.3f} s: {fault}" for fault in self.faults),
        )


def _names(role: str, num_nodes: int) -> tuple[str, ...]:
    return tuple(f"{role}-{index}" for index in range(1, num_nodes + 1))
