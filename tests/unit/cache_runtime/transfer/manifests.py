"""Small valid manifests to break in tests."""

from __future__ import annotations

from dataclasses import replace

from cache_runtime.recipes.spec import CacheFamily, CacheRetention
from cache_runtime.transfer.schema import (
    FieldPlacement,
    FieldSchema,
    GroupBlockCount,
    GroupSchema,
    LogicalManifest,
    PlacementManifest,
    RankPlacement,
    StageSchema,
)

BLOCK_BYTES = 64 * 3 * 16 * 4

FULL = GroupSchema(
    group_id="full", family=CacheFamily.HISTORY, retention=CacheRetention.FULL_HISTORY, block_granularity=64
)
WINDOW = GroupSchema(
    group_id="window",
    family=CacheFamily.HISTORY,
    retention=CacheRetention.SLIDING_WINDOW,
    block_granularity=32,
    sliding_window_tokens=128,
)
FIELD_IDS = ("layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v")


def field(field_id: str, group_id: str = "full") -> FieldSchema:
    return FieldSchema(field_id=field_id, group_id=group_id, dtype="float32", block_shape=(64, 3, 16), partition_axis=1)


def logical() -> LogicalManifest:
    return LogicalManifest(
        model_fingerprint="abc",
        weight_version="",
        prefix_granularity=64,
        groups=(FULL,),
        fields=tuple(field(field_id) for field_id in FIELD_IDS),
        stages=(StageSchema(field_ids=FIELD_IDS[:2]), StageSchema(field_ids=FIELD_IDS[2:])),
    )


def rank(num_blocks: int = 10, *, arena_base: int = 1 << 20) -> RankPlacement:
    """Planes one after the other, without gaps."""
    plane_bytes = num_blocks * BLOCK_BYTES
    return RankPlacement(
        tp_rank=0,
        tp_size=1,
        data_plane="memory",
        endpoint="memory:1",
        arena_base=arena_base,
        arena_bytes=len(FIELD_IDS) * plane_bytes,
        fields=tuple(
            FieldPlacement(
                field_id=field_id,
                offset_bytes=index * plane_bytes,
                block_stride_bytes=BLOCK_BYTES,
                block_bytes=BLOCK_BYTES,
            )
            for index, field_id in enumerate(FIELD_IDS)
        ),
        block_counts=(GroupBlockCount(group_id="full", num_blocks=num_blocks),),
    )


def manifest(num_blocks: int = 10, *, arena_base: int = 1 << 20) -> PlacementManifest:
    return PlacementManifest(logical=logical(), ranks=(rank(num_blocks, arena_base=arena_base),))


def with_field(placement: RankPlacement, field_id: str, **changes: int) -> RankPlacement:
    """The same rank with one field's placement changed."""
    fields = tuple(replace(item, **changes) if item.field_id == field_id else item for item in placement.fields)
    return replace(placement, fields=fields)
