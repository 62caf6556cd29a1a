"""Manifests as earlier releases sent them, byte for byte, are read and found to fit; so is what a later one may add.

A file per release in `golden/`, named after it. They are never written anew: a release that cannot read one of them
cannot be rolled out beside the nodes that send it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.internal.encoder import TagBytes
from google.protobuf.message import Message
from pdmesh.v1 import cache_pb2

from cache_runtime.recipes.spec import CacheFamily, CacheRetention
from cache_runtime.transfer.placement import check_bridgeable, logical_differences
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
from node_runtime.wire.manifest import manifest_from_proto, manifest_to_proto

RECORDED = sorted((Path(__file__).parent / "golden").glob("manifest_*.binpb"))
# No release has a field of this number in any message.
UNKNOWN_FIELD = TagBytes(1000, 2) + b"\x03new"


def described() -> PlacementManifest:
    """What the recorded manifests say: every kind of group, fields of two types, one of them split over ranks."""
    full = GroupSchema(
        group_id="full", family=CacheFamily.HISTORY, retention=CacheRetention.FULL_HISTORY, block_granularity=16
    )
    window = replace(
        full, group_id="window", retention=CacheRetention.SLIDING_WINDOW, sliding_window_tokens=48, replayable=True
    )
    state = GroupSchema(
        group_id="state", family=CacheFamily.STATE, retention=CacheRetention.FULL_HISTORY, block_granularity=32
    )
    shapes = {"layers.0.k": ("full", "float32", (16, 2, 8)), "layers.1.k": ("window", "bfloat16", (16, 2, 8))}
    fields = [
        FieldSchema(field_id=field_id, group_id=group_id, dtype=dtype, block_shape=shape, partition_axis=1)
        for field_id, (group_id, dtype, shape) in shapes.items()
    ]
    fields.append(FieldSchema(field_id="layers.2.state", group_id="state", dtype="float32", block_shape=(4, 32)))
    placements, offset_bytes = [], 0
    for item in fields:
        placement = FieldPlacement(
            field_id=item.field_id,
            offset_bytes=offset_bytes,
            block_stride_bytes=1024,
            block_bytes=item.rank_block_bytes(1),
        )
        placements.append(placement)
        offset_bytes = placement.end_bytes(8)
    rank = RankPlacement(
        tp_rank=0,
        tp_size=1,
        data_plane="mooncake",
        endpoint="10.0.0.7:15342",
        arena_base=1 << 32,
        arena_bytes=offset_bytes,
        fields=tuple(placements),
        block_counts=tuple(GroupBlockCount(group_id=name, num_blocks=8) for name in ("full", "window", "state")),
    )
    logical = LogicalManifest(
        model_fingerprint="0123456789abcdef",
        weight_version="v1",
        prefix_granularity=32,
        groups=(full, window, state),
        fields=tuple(fields),
        stages=tuple(StageSchema(field_ids=(item.field_id,)) for item in fields),
    )
    return PlacementManifest(logical=logical, ranks=(rank,))


def shared_by(manifest: PlacementManifest, num_ranks: int) -> PlacementManifest:
    """The same cache on several ranks, whose arenas follow one another."""
    (rank,) = manifest.ranks
    block_bytes = {item.field_id: item.rank_block_bytes(num_ranks) for item in manifest.logical.fields}
    fields = tuple(replace(item, block_bytes=block_bytes[item.field_id]) for item in rank.fields)
    ranks = tuple(
        replace(
            rank,
            tp_rank=index,
            tp_size=num_ranks,
            arena_base=rank.arena_base + index * rank.arena_bytes,
            fields=fields,
        )
        for index in range(num_ranks)
    )
    return replace(manifest, ranks=ranks)


def messages_within(message: Message) -> list[Message]:
    """The message and every message in it."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in value if field.is_repeated else (value,):
                found += messages_within(item)
    return found


def test_there_is_a_recorded_manifest() -> None:
    assert RECORDED


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_manifest_of_every_release_is_read_and_fits_what_this_one_says_of_the_same_cache(path: Path) -> None:
    recorded = manifest_from_proto(cache_pb2.PlacementManifest.FromString(path.read_bytes()))
    ours = manifest_from_proto(manifest_to_proto(described()))
    assert logical_differences(ours.logical, recorded.logical, local_name="decode", peer_name="prefill") == ()
    assert check_bridgeable(recorded, ours) == check_bridgeable(ours, recorded) == ()
    assert recorded == ours


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_node_of_every_release_is_bridged_to_one_of_several_tensor_ranks(path: Path) -> None:
    recorded = manifest_from_proto(cache_pb2.PlacementManifest.FromString(path.read_bytes()))
    ours = manifest_from_proto(manifest_to_proto(shared_by(described(), 2)))
    assert [rank.tp_rank for rank in ours.ranks] == [0, 1]
    assert logical_differences(ours.logical, recorded.logical, local_name="decode", peer_name="prefill") == ()
    assert check_bridgeable(recorded, ours) == check_bridgeable(ours, recorded) == ()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_fields_that_a_later_release_adds_anywhere_are_ignored(path: Path) -> None:
    message = cache_pb2.PlacementManifest.FromString(path.read_bytes())
    expected = manifest_from_proto(message)
    places = messages_within(message)
    assert len(places) > 15
    for place in places:
        place.MergeFromString(UNKNOWN_FIELD)
    later = message.SerializeToString()
    assert later.count(UNKNOWN_FIELD) == len(places)
    assert manifest_from_proto(cache_pb2.PlacementManifest.FromString(later)) == expected
