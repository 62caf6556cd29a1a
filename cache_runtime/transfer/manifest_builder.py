"""Makes the manifest of a node from its memory plan: what `schema` describes, for the arena that this process has.

Knows plans and addresses; no engine, no peer and no wire format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cache_runtime.recipes.partition import ONLY_RANK, TensorRank
from cache_runtime.recipes.spec import CacheFieldSpec

from .manifest_rules import ManifestError
from .schema import (
    FieldPlacement,
    FieldSchema,
    GroupBlockCount,
    GroupSchema,
    LogicalManifest,
    PlacementManifest,
    PlaneOffer,
    RankPlacement,
    StageSchema,
)

if TYPE_CHECKING:
    from cache_runtime.recipes.plan import CacheMemoryPlan


def build_manifest(
    plan: CacheMemoryPlan,
    *,
    stages: Sequence[Sequence[str]],
    model_fingerprint: str,
    weight_version: str,
    arena_base: int,
    data_plane: str,
    endpoint: str,
    planes: Sequence[PlaneOffer] = (),
) -> PlacementManifest:
    """The manifest of a node with one rank, whose arena of `plan` starts at address `arena_base`.

    `stages` lists the field ids that become complete together, in the order of a forward pass; `planes` all ways to
    write to the arena, of which `data_plane` at `endpoint` is the one that older releases know. Raises `ManifestError`
    when they do not name every field of the plan exactly once, and for a sharded group, whose block ids are not the
    arena's.
    """
    logical = describe_cache(plan, stages=stages, model_fingerprint=model_fingerprint, weight_version=weight_version)
    rank = place_rank(plan, ONLY_RANK, arena_base=arena_base, data_plane=data_plane, endpoint=endpoint, planes=planes)
    return PlacementManifest(logical=logical, ranks=(rank,))


def describe_cache(
    plan: CacheMemoryPlan, *, stages: Sequence[Sequence[str]], model_fingerprint: str, weight_version: str
) -> LogicalManifest:
    """The logical part, the same from the plan of any tensor rank. Raises `ManifestError` like `build_manifest`."""
    for spec in plan.groups:
        if spec.shard_count > 1:
            raise ManifestError(f'group "{spec.group_id}": shard_count must be 1 in a handoff, got {spec.shard_count}')
    return LogicalManifest(
        model_fingerprint=model_fingerprint,
        weight_version=weight_version,
        prefix_granularity=plan.prefix_granularity,
        groups=tuple(
            GroupSchema(
                group_id=spec.group_id,
                family=spec.family,
                retention=spec.retention,
                block_granularity=spec.block_granularity,
                sliding_window_tokens=spec.sliding_window_tokens,
                replayable=spec.replayable,
            )
            for spec in plan.groups
        ),
        fields=tuple(_global_field(field, group.group_id) for group in plan.layout.groups for field in group.fields),
        stages=tuple(StageSchema(field_ids=tuple(field_ids)) for field_ids in stages),
    )


def place_rank(
    plan: CacheMemoryPlan,
    rank: TensorRank,
    *,
    arena_base: int,
    data_plane: str,
    endpoint: str,
    planes: Sequence[PlaneOffer] = (),
) -> RankPlacement:
    """The placement of one tensor rank, whose arena of `plan` starts at address `arena_base`."""
    return RankPlacement(
        tp_rank=rank.rank,
        tp_size=rank.size,
        data_plane=data_plane,
        endpoint=endpoint,
        planes=tuple(planes),
        arena_base=arena_base,
        arena_bytes=plan.num_arena_bytes,
        fields=tuple(
            FieldPlacement(
                field_id=item.field_id,
                offset_bytes=item.offset_bytes,
                block_stride_bytes=item.block_stride_bytes,
                block_bytes=item.block_bytes,
            )
            for item in plan.fields
        ),
        block_counts=tuple(
            GroupBlockCount(group_id=spec.group_id, num_blocks=plan.num_blocks(spec.group_id)) for spec in plan.groups
        ),
    )


def _global_field(field: CacheFieldSpec, group_id: str) -> FieldSchema:
    """The field over all ranks. Heads of one element need no sections: the axis itself counts them."""
    shape, axis, sections = field.block_shape, field.partition_axis, field.partition_sections
    if axis is not None and sections:
        shape = (*shape[:axis], sum(section.extent for section in sections), *shape[axis + 1 :])
    is_plain = len(sections) == 1 and sections[0].head_width == 1
    return FieldSchema(
        field_id=field.field_id,
        group_id=group_id,
        dtype=field.dtype,
        block_shape=shape,
        partition_axis=axis,
        partition_sections=() if is_plain else sections,
    )
