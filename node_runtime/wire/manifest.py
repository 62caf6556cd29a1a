"""Codec of the placement manifest (protos/pdmesh/v1/cache.proto).

The schema classes check everything; their refusals become InvalidRequest here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pdmesh.v1 import cache_pb2

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.partition import HeadSection
from cache_runtime.recipes.spec import CacheFamily, CacheRetention
from cache_runtime.transfer.manifest_rules import ManifestError
from cache_runtime.transfer.schema import (
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
from node_runtime.errors import InvalidRequest

_FAMILIES: Mapping[CacheFamily, cache_pb2.CacheFamily.ValueType] = MappingProxyType(
    {CacheFamily.HISTORY: cache_pb2.CACHE_FAMILY_HISTORY, CacheFamily.STATE: cache_pb2.CACHE_FAMILY_STATE}
)
_RETENTIONS: Mapping[CacheRetention, cache_pb2.CacheRetention.ValueType] = MappingProxyType(
    {
        CacheRetention.FULL_HISTORY: cache_pb2.CACHE_RETENTION_FULL_HISTORY,
        CacheRetention.SLIDING_WINDOW: cache_pb2.CACHE_RETENTION_SLIDING_WINDOW,
    }
)
_FAMILY_BY_NUMBER = MappingProxyType({number: family for family, number in _FAMILIES.items()})
_RETENTION_BY_NUMBER = MappingProxyType({number: retention for retention, number in _RETENTIONS.items()})


def manifest_to_proto(manifest: PlacementManifest) -> cache_pb2.PlacementManifest:
    return cache_pb2.PlacementManifest(
        logical=_logical_to_proto(manifest.logical), ranks=[_rank_to_proto(rank) for rank in manifest.ranks]
    )


def manifest_from_proto(message: cache_pb2.PlacementManifest) -> PlacementManifest:
    """Raises InvalidRequest naming the field and its limit."""
    try:
        return PlacementManifest(
            logical=_logical_from_proto(message.logical), ranks=tuple(_rank_from_proto(rank) for rank in message.ranks)
        )
    except ManifestError as error:
        raise InvalidRequest(f"manifest: {error}") from None


def _logical_to_proto(logical: LogicalManifest) -> cache_pb2.LogicalManifest:
    return cache_pb2.LogicalManifest(
        model_fingerprint=logical.model_fingerprint,
        weight_version=logical.weight_version,
        prefix_granularity=logical.prefix_granularity,
        groups=[_group_to_proto(group) for group in logical.groups],
        fields=[
            cache_pb2.CacheField(
                field_id=item.field_id,
                group_id=item.group_id,
                dtype=item.dtype,
                block_shape=item.block_shape,
                partition_axis=item.partition_axis,
                partition_sections=[
                    cache_pb2.HeadSection(num_heads=section.num_heads, head_width=section.head_width)
                    for section in item.partition_sections
                ],
            )
            for item in logical.fields
        ],
        stages=[cache_pb2.CacheStage(field_ids=stage.field_ids) for stage in logical.stages],
    )


def _logical_from_proto(message: cache_pb2.LogicalManifest) -> LogicalManifest:
    return LogicalManifest(
        model_fingerprint=message.model_fingerprint,
        weight_version=message.weight_version,
        prefix_granularity=message.prefix_granularity,
        groups=tuple(_group_from_proto(group) for group in message.groups),
        fields=tuple(
            FieldSchema(
                field_id=item.field_id,
                group_id=item.group_id,
                dtype=item.dtype,
                block_shape=tuple(item.block_shape),
                partition_axis=item.partition_axis if item.HasField("partition_axis") else None,
                partition_sections=_sections_from_proto(item),
            )
            for item in message.fields
        ),
        stages=tuple(StageSchema(field_ids=tuple(stage.field_ids)) for stage in message.stages),
    )


def _sections_from_proto(item: cache_pb2.CacheField) -> tuple[HeadSection, ...]:
    try:
        return tuple(
            HeadSection(num_heads=section.num_heads, head_width=section.head_width)
            for section in item.partition_sections
        )
    except CacheConfigError as error:
        raise ManifestError(f'field "{item.field_id}": {error}') from error


def _group_to_proto(group: GroupSchema) -> cache_pb2.CacheGroup:
    return cache_pb2.CacheGroup(
        group_id=group.group_id,
        family=_FAMILIES[group.family],
        retention=_RETENTIONS[group.retention],
        block_granularity=group.block_granularity,
        sliding_window_tokens=group.sliding_window_tokens,
        replayable=group.replayable,
    )


def _group_from_proto(message: cache_pb2.CacheGroup) -> GroupSchema:
    family = _FAMILY_BY_NUMBER.get(message.family)
    retention = _RETENTION_BY_NUMBER.get(message.retention)
    if family is None:
        raise ManifestError(f'group "{message.group_id}": family has the unknown value {message.family}')
    if retention is None:
        raise ManifestError(f'group "{message.group_id}": retention has the unknown value {message.retention}')
    return GroupSchema(
        group_id=message.group_id,
        family=family,
        retention=retention,
        block_granularity=message.block_granularity,
        sliding_window_tokens=message.sliding_window_tokens if message.HasField("sliding_window_tokens") else None,
        replayable=message.replayable,
    )


def _rank_to_proto(rank: RankPlacement) -> cache_pb2.RankPlacement:
    return cache_pb2.RankPlacement(
        tp_rank=rank.tp_rank,
        tp_size=rank.tp_size,
        data_plane=rank.data_plane,
        endpoint=rank.endpoint,
        arena_base=rank.arena_base,
        arena_bytes=rank.arena_bytes,
        fields=[
            cache_pb2.FieldPlacement(
                field_id=item.field_id,
                offset_bytes=item.offset_bytes,
                block_stride_bytes=item.block_stride_bytes,
                block_bytes=item.block_bytes,
            )
            for item in rank.fields
        ],
        block_counts=[
            cache_pb2.GroupBlockCount(group_id=count.group_id, num_blocks=count.num_blocks)
            for count in rank.block_counts
        ],
        planes=[
            cache_pb2.PlaneOffer(
                name=offer.name, endpoint=offer.endpoint, protocol=offer.protocol, host_id=offer.host_id
            )
            for offer in rank.planes
        ],
    )


def _rank_from_proto(message: cache_pb2.RankPlacement) -> RankPlacement:
    return RankPlacement(
        tp_rank=message.tp_rank,
        tp_size=message.tp_size,
        data_plane=message.data_plane,
        endpoint=message.endpoint,
        arena_base=message.arena_base,
        arena_bytes=message.arena_bytes,
        fields=tuple(
            FieldPlacement(
                field_id=item.field_id,
                offset_bytes=item.offset_bytes,
                block_stride_bytes=item.block_stride_bytes,
                block_bytes=item.block_bytes,
            )
            for item in message.fields
        ),
        block_counts=tuple(
            GroupBlockCount(group_id=count.group_id, num_blocks=count.num_blocks) for count in message.block_counts
        ),
        planes=tuple(
            PlaneOffer(name=offer.name, endpoint=offer.endpoint, protocol=offer.protocol, host_id=offer.host_id)
            for offer in message.planes
        ),
    )
