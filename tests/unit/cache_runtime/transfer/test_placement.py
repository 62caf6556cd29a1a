"""Comparing two manifests: each difference is named with both values, and what cannot be bridged is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from unit.cache_runtime.transfer.manifests import FIELD_IDS, FULL, WINDOW, field, logical, manifest, rank

from cache_runtime.recipes.partition import HeadSection
from cache_runtime.recipes.spec import CacheFamily
from cache_runtime.transfer.manifest_rules import ManifestError
from cache_runtime.transfer.placement import MAX_LINKED_RANKS, check_bridgeable, logical_differences
from cache_runtime.transfer.schema import LogicalManifest, PlacementManifest, StageSchema


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
    assert check_bridgeable(manifest(), target) == ("data_plane source=memory, target=mooncake",)


def ranks_of(tp_size: int) -> PlacementManifest:
    """A node whose ranks share heads, or repeat them."""
    extent = max(1, 3 // tp_size)
    fields = tuple(replace(item, block_bytes=item.block_bytes // 3 * extent) for item in rank().fields)
    ranks = tuple(replace(rank(), tp_rank=index, tp_size=tp_size, fields=fields) for index in range(tp_size))
    return PlacementManifest(logical=logical(), ranks=ranks)


@pytest.mark.parametrize("tp_size", [3, 6])
def test_another_number_of_tensor_ranks_is_bridged(tp_size: int) -> None:
    assert check_bridgeable(manifest(), ranks_of(tp_size)) == ()
    assert check_bridgeable(ranks_of(tp_size), manifest()) == ()
    assert check_bridgeable(ranks_of(tp_size), ranks_of(3)) == ()


def test_more_tensor_ranks_than_are_linked_are_refused_on_either_side() -> None:
    many = 3 * MAX_LINKED_RANKS
    assert check_bridgeable(manifest(), ranks_of(many)) == (f"tp_size target={many}, limit {MAX_LINKED_RANKS}",)
    assert check_bridgeable(ranks_of(many), manifest()) == (f"tp_size source={many}, limit {MAX_LINKED_RANKS}",)


def test_ranks_of_a_target_are_reached_over_one_link() -> None:
    first, *others, last = ranks_of(3).ranks
    apart = replace(ranks_of(3), ranks=(first, *others, replace(last, endpoint="memory:2")))
    assert check_bridgeable(manifest(), apart) == (
        "target ranks 0 and 2: reached at memory memory:1 and at memory memory:2, one link must lead to all of them",
    )
    assert check_bridgeable(apart, manifest()) == ()


def test_heads_that_do_not_share_out_on_a_side_have_no_manifest_there() -> None:
    with pytest.raises(ManifestError, match="3 heads can neither be split over 2 tensor ranks nor be repeated on them"):
        ranks_of(2)


def test_other_sections_of_a_partitioned_axis_are_named_with_both_values() -> None:
    peer = with_first_field(block_shape=(64, 3, 16), partition_sections=(HeadSection(num_heads=1, head_width=3),))
    assert differences(logical(), peer) == (WHERE + "partition_sections decode=none, prefill=[1 x 3]",)
