"""The NodeInfo of a compute node."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

from pdmesh.v1 import mesh_pb2

from node_runtime.engine.core import ComputeCore
from node_runtime.wire.adapter import adapters_to_proto


def describe_node(
    core: ComputeCore, *, node_id: str, incarnation: int, role: mesh_pb2.NodeRole.ValueType
) -> mesh_pb2.NodeInfo:
    """Facts that hold for the life of the process."""
    facts = core.facts
    return mesh_pb2.NodeInfo(
        node_id=node_id,
        incarnation=incarnation,
        role=role,
        version=_own_version(),
        model=facts.name,
        model_fingerprint=facts.fingerprint,
        vocab_size=facts.vocab_size,
        context_tokens=facts.context_tokens,
        max_request_tokens=core.scheduler.max_request_tokens,
        prefix_granularity=facts.prefix_granularity,
        weight_formats=facts.weight_formats,
        weight_bytes=facts.weight_bytes,
        device=facts.device,
        batch_invariant=facts.is_batch_invariant,
        capacity_tokens=facts.capacity_tokens,
        adapters=adapters_to_proto(facts.adapters),
        data_plane="" if core.data_plane is None else core.data_plane.engine.name,
    )


@cache
def _own_version() -> str:
    """Read once: it lies in a file."""
    return version("pdmesh")
