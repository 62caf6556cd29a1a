"""Comparing two manifests: each difference is named with both values, and what cannot be bridged is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from unit.cache_runtime.transfer.manifests import FIELD_IDS, FULL, WINDOW, field, logical, manifest, rank

from cache_runtime.recipes.spec import CacheFamily
from cache_runtime.transfer.placement import check_bridgeable, logical_differences
from cache_runtime.transfer.schema import GroupBlockCount, LogicalManifest, PlacementManifest, StageSchema


def differences(local: LogicalManifest, peer: LogicalManifest) -> tuple[str, ...]:
    return logical_differences(local, peer, local_name="decode", peer_name="prefill")


def with_first_group(**changes: object) -> LogicalManifest:
    return replace(logical(), groups=(replace(FULL, **changes),))  # type: ignore[arg-type]


def with_first_field(**changes: object) -> LogicalManifest:
    first, *rest = logical().fields
    return replace(logical(), fields=(replace(first, **changes), *rest))  # type: ignore[arg-type]


def test_equal_manifests_do_not_differ() -> None:
    assert differences(logical(), logical()) == ()


def test_the_order_of_groups_and_fields_does_not_matter() -> None:
    assert differences(logical(), replace(logical(), fields=tuple(reversed(logical().fields)))) == ()


WHERE = 'group "full" field "layers.0.k": '


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (replace(logical(), model_fingerprint="xyz"), "model_fingerprint decode=abc, prefill=xyz"),
        (replace(logical(), weight_version="w2"), 'weight_version decode="", prefill=w2'),
        (replace(logical(), prefix_granularity=128), "prefix_granularity decode=64, prefill=128"),
        (with_first_group(family=CacheFamily.STATE), 'group "full": family decode=history, prefill=state'),
        (with_first_group(block_granularity=32), 'group "full": block_granularity decode=64, prefill=32'),
        (with_first_field(dtype="bfloat16"), WHERE + "dtype decode=float32, prefill=bfloat16"),
        (with_first_field(block_shape=(64, 3, 8)), WHERE + "block_shape decode=[64, 3, 16], prefill=[64, 3, 8]"),
        (with_first_field(partition_axis=None), WHERE + "partition_axis decode=1, prefill=none"),
        (
            replace(logical(), stages=tuple(reversed(logical().stages))),
            "stage 0: field_ids decode=layers.0.k,layers.0.v, prefill=layers.1.k,layers.1.v",
        ),
        (replace(logical(), stages=(StageSchema(field_ids=FIELD_IDS),)), "stages: number decode=2, prefill=1"),
    ],
)
def test_each_difference_is_named_with_both_values(peer: LogicalManifest, expected: str) -> None:
    assert expected in differences(logical(), peer)


def test_window_and_replay_differences_are_named() -> None:
    fields = tuple(field(name, "window") for name in FIELD_IDS)
    local = replace(logical(), groups=(WINDOW,), fields=fields)
    peer = replace(local, groups=(replace(WINDOW, sliding_window_tokens=256, replayable=True),))
    assert differences(local, peer) == (
        'group "window": sliding_window_tokens decode=128, prefill=256',
        'group "window": replayable decode=False, prefill=True',
    )


def test_groups_and_fields_of_one_side_only_are_named() -> None:
    stages = (*logical().stages, StageSchema(field_ids=("ring",)))
    peer = replace(logical(), groups=(FULL, WINDOW), fields=(*logical().fields, field("ring", "window")), stages=stages)
    assert differences(logical(), peer) == (
        'group "window": decode=missing, prefill=present',
        'group "window" field "ring": decode=missing, prefill=present',
        "stages: number decode=2, prefill=3",
    )
    assert 'group "window" field "ring": decode=present, prefill=missing' in differences(peer, logical())


def test_every_difference_is_reported_at_once() -> None:
    peer = replace(with_first_field(dtype="float16", block_shape=(64, 6, 16)), model_fingerprint="xyz")
    assert len(differences(logical(), peer)) == 3


@pytest.mark.parametrize(
    "make_target",
    [
        lambda: manifest(25),
        lambda: manifest(arena_base=1 << 40),
        lambda: PlacementManifest(logical=logical(), ranks=(replace(rank(), endpoint="memory:2"),)),
    ],
    ids=["capacity", "address", "endpoint"],
)
def test_other_capacity_and_addresses_are_bridged(make_target: Callable[[], PlacementManifest]) -> None:
    assert check_bridgeable(manifest(), make_target()) == ()


def test_another_data_plane_is_not_bridged() -> None:
    target = PlacementManifest(logical=logical(), ranks=(replace(rank(), data_plane="mooncake"),))
    assert check_bridgeable(manifest(), target) == ("rank 0: data_plane source=memory, target=mooncake",)


def test_another_tensor_parallel_size_is_not_bridged() -> None:
    third = rank().fields[0].block_bytes // 3
    ranks = tuple(
        replace(
            rank(),
            tp_rank=index,
            tp_size=3,
            fields=tuple(replace(item, block_bytes=third) for item in rank().fields),
            block_counts=(GroupBlockCount(group_id="full", num_blocks=10),),
        )
        for index in range(3)
    )
    (reason,) = check_bridgeable(manifest(), PlacementManifest(logical=logical(), ranks=ranks))
    assert reason.startswith("tp_size source=1, target=3")
