"""What a compute node is made of below the network: executor, scheduler, data plane, and the facts about the model.

A plain bundle, so that a node can be composed around other parts (see `assembly.py` for the real ones).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cache_runtime.transfer.engine import TransferEngine
from cache_runtime.transfer.plane_set import PlaneSet
from cache_runtime.transfer.schema import PlacementManifest
from node_runtime.adapters import AdapterId
from node_runtime.config import ComputeNodeConfig, format_size
from node_runtime.engine.loop import Executor
from node_runtime.engine.scheduler import EngineScheduler
from node_runtime.errors import BadConfig, InternalError
from scheduler_core import Role

# What the extra `compute` installs; a router does without.
_COMPUTE_MODULES = ("torch", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What does not change while the node lives."""

    name: str
    path: str
    fingerprint: str
    vocab_size: int
    context_tokens: int
    prefix_granularity: int
    arena_bytes: int
    num_lcm_blocks: int
    capacity_tokens: int
    weight_formats: tuple[str, ...]
    weight_bytes: int
    float32_weight_bytes: int
    num_threads: int
    device: str
    is_batch_invariant: bool
    num_tensor_ranks: int = 1
    adapters: tuple[AdapterId, ...] = ()
    adapter_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlane:
    """The engines that move cache bytes, and the manifest that tells peers where the arena lies."""

    planes: PlaneSet
    manifest: PlacementManifest

    @property
    def engine(self) -> TransferEngine:
        """The one that a peer of an older release writes through: the only one that it reads in the manifest."""
        found = self.planes.find(self.manifest.ranks[0].data_plane)
        if found is None:
            raise InternalError("the manifest names a data plane that this node does not have")
        return found


class RankProcesses(Protocol):
    """The other tensor ranks of a node, which live and end with it."""

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """Calls `on_lost` should a rank end before `close`, from then on."""

    def close(self) -> None:
        """Ends them. The engine must have stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCore:
    """The parts of one node. `data_plane` is None on a fused node, `ranks` on one that computes alone."""

    executor: Executor
    scheduler: EngineScheduler
    group_ids: tuple[str, ...]
    facts: ModelFacts
    data_plane: DataPlane | None
    ranks: RankProcesses | None = None

    def require_data_plane(self) -> DataPlane:
        """Raises InternalError on a node that was composed without one."""
        if self.data_plane is None:
            raise InternalError("this role needs a data plane")
        return self.data_plane

    def describe(self) -> tuple[str, ...]:
        """Start-up lines for the log."""
        facts = self.facts
        lines = [
            f"model {facts.name} from {facts.path}: context {facts.context_tokens} tokens, "
            f"vocabulary {facts.vocab_size}, {facts.num_threads} threads on {facts.device}"
            f"{'' if facts.is_batch_invariant else ', last bits may depend on what shares a batch'}",
            f"weights {format_size(facts.weight_bytes)} in memory as {', '.join(facts.weight_formats)}, float32 would "
            f"be {format_size(facts.float32_weight_bytes)}",
            f"cache arena {format_size(facts.arena_bytes)}: {facts.capacity_tokens} tokens in {facts.num_lcm_blocks} "
            f"LCM blocks, prefix granularity {facts.prefix_granularity} tokens, at most "
            f"{self.scheduler.max_request_tokens} tokens per request",
        ]
        if facts.adapters:
            names = ", ".join(map(str, facts.adapters))
            lines.append(f"adapters {names}: {format_size(facts.adapter_bytes)} in memory")
        if facts.num_tensor_ranks > 1:
            lines.append(f"{facts.num_tensor_ranks} tensor ranks; threads, weights and arena are those of one")
        if self.data_plane is not None:
            engines = self.data_plane.planes.engines
            offered = (f"{engine.name} ({engine.protocol}) at {engine.endpoint}" for engine in engines)
            lines.append(f"data planes: {', '.join(offered)}")
        return tuple(lines)


def load_core(config: ComputeNodeConfig, role: Role, *, max_ready_ungranted: int = 64) -> ComputeCore:
    """Builds the real parts; blocking. Raises BadConfig naming the culprit, or what is not installed.

    The model code is imported here and not with the module, so that a node can be composed around other parts.
    """
    try:
        from node_runtime.engine.assembly import build_core
    except ModuleNotFoundError as error:
        if error.name not in _COMPUTE_MODULES:
            raise
        raise BadConfig(
            f"{error.name} is not installed, and a {role.name.lower()} node computes with it; "
            "install it with: pip install 'pdmesh[compute]'"
        ) from error
    return build_core(config, role, max_ready_ungranted=max_ready_ungranted)
