"""Every rule a manifest must keep, since a peer that is not trusted sends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.cache_runtime.transfer.manifests import (
    BLOCK_BYTES,
    FIELD_IDS,
    FULL,
    WINDOW,
    field,
    logical,
    manifest,
    rank,
    with_field,
)

from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.partition import HeadSection
from cache_runtime.recipes.plan import pack
from cache_runtime.recipes.rows import key_value_fields
from cache_runtime.recipes.sliding_full import SlidingFullCacheRecipe
from cache_runtime.recipes.spec import CacheFamily, CacheFieldSpec, CacheGroupSpec, CacheRetention
from cache_runtime.transfer.manifest_builder import build_manifest
from cache_runtime.transfer.manifest_rules import MAX_FIELDS, MAX_GROUPS, MAX_NAME_CHARS, ManifestError
from cache_runtime.transfer.planner import coalesce, plan_block_runs
from cache_runtime.transfer.schema import (
    FieldPlacement,
    GroupBlockCount,
    PlacementManifest,
    StageSchema,
)

HUGE = 1 << 63


def test_the_sample_manifest_is_valid() -> None:
    assert manifest().ranks[0].find_num_blocks("full") == 10
    assert manifest().ranks[0].find_field("layers.1.k") == rank().fields[2]
    assert manifest().ranks[0].find_field("layers.9.k") is None
    assert manifest() == manifest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: replace(FULL, group_id=""), "group_id has 0 characters"),
        (lambda: replace(FULL, group_id="x" * (MAX_NAME_CHARS + 1)), f"group_id has {MAX_NAME_CHARS + 1} characters"),
        (lambda: replace(FULL, block_granularity=0), 'group "full": block_granularity=0'),
        (lambda: replace(FULL, block_granularity=1 << 31), 'group "full": block_granularity=2147483648'),
        (lambda: replace(FULL, sliding_window_tokens=5), "sliding_window_tokens=5 with retention=full_history"),
        (lambda: replace(WINDOW, sliding_window_tokens=None), "=None with retention=sliding_window"),
        (lambda: replace(WINDOW, sliding_window_tokens=0), "sliding_window_tokens=0"),
        (lambda: replace(FULL, replayable=True), "replayable with retention=full_history"),
        (lambda: replace(field("f"), field_id=""), "field_id has 0 characters"),
        (lambda: replace(field("f"), dtype="float31"), 'field "f": dtype "float31" is not one of float32'),
        (lambda: replace(field("f"), block_shape=(), partition_axis=None), "block_shape has 0 axes"),
        (lambda: replace(field("f"), block_shape=(1,) * 9), "block_shape has 9 axes"),
        (lambda: replace(field("f"), block_shape=(64, 0, 16)), r"block_shape\[1\]=0"),
        (lambda: replace(field("f"), block_shape=(64, -3, 16)), r"block_shape\[1\]=-3"),
        (lambda: replace(field("f"), partition_axis=3), "partition_axis=3 is outside block_shape of 3 axes"),
        (lambda: replace(field("f"), partition_axis=-1), "partition_axis=-1"),
        (
            lambda: replace(field("f"), partition_sections=(HeadSection(num_heads=4),)),
            r"partition_sections have 4 elements, block_shape\[1\]=3",
        ),
        (
            lambda: replace(field("f"), partition_sections=(HeadSection(num_heads=3),) * 17),
            "partition_sections: 17 entries, not 1 to 16",
        ),
        (
            lambda: replace(field("f"), partition_axis=None, partition_sections=(HeadSection(num_heads=3),)),
            "partition_sections need a partition_axis",
        ),
        (lambda: StageSchema(field_ids=()), "a stage has no field_ids"),
    ],
)
def test_a_group_field_or_stage_that_breaks_a_rule_is_refused_by_name(
    change: Callable[[], object], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        change()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: replace(logical(), model_fingerprint=""), "model_fingerprint has 0"),
        (lambda: replace(logical(), weight_version="x" * 257), "weight_version has 257 characters"),
        (lambda: replace(logical(), prefix_granularity=0), "prefix_granularity=0"),
        (
            lambda: replace(logical(), prefix_granularity=96),
            "block_granularity=64 does not divide prefix_granularity=96",
        ),
        (lambda: replace(logical(), groups=()), "groups: 0 entries"),
        (lambda: replace(logical(), groups=(FULL,) * (MAX_GROUPS + 1)), f"groups: {MAX_GROUPS + 1} entries"),
        (lambda: replace(logical(), groups=(FULL, FULL)), 'groups: "full" appears twice'),
        (lambda: replace(logical(), groups=(FULL, WINDOW)), '"window" is in groups but not in groups with fields'),
        (lambda: replace(logical(), fields=()), "fields: 0 entries"),
        (lambda: replace(logical(), fields=logical().fields * (MAX_FIELDS // 4 + 1)), "fields: 4100 entries"),
        (lambda: replace(logical(), fields=(*logical().fields, field("x", "ssm"))), 'group_id "ssm" is not among'),
        (lambda: replace(logical(), fields=(field("a"), field("a"))), 'fields: "a" appears twice'),
        (lambda: replace(logical(), stages=()), "stages: 0 entries"),
        (lambda: replace(logical(), stages=logical().stages[:1]), '"layers.1.k" is in fields but not in stages'),
        (lambda: replace(logical(), stages=logical().stages * 2), "stages name 8 fields, there are 4"),
        (
            lambda: replace(logical(), stages=(StageSchema(field_ids=(*FIELD_IDS[:3], FIELD_IDS[0])),)),
            'stages: "layers.0.k" appears twice',
        ),
        (
            lambda: replace(logical(), stages=(StageSchema(field_ids=(*FIELD_IDS[:3], "layers.7.k")),)),
            '"layers.1.v" is in fields but not in stages',
        ),
    ],
)
def test_a_logical_manifest_that_breaks_a_rule_is_refused_by_name(change: Callable[[], object], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        change()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: replace(rank(), tp_rank=1), "tp_rank=1, tp_size=1"),
        (lambda: replace(rank(), tp_rank=-1), "tp_rank=-1"),
        (lambda: replace(rank(), tp_size=1 << 20), "tp_size=1048576"),
        (lambda: replace(rank(), data_plane=""), "data_plane has 0"),
        (lambda: replace(rank(), endpoint="x" * 300), "endpoint has 300"),
        (lambda: replace(rank(), arena_base=0), "arena_base=0x0"),
        (lambda: replace(rank(), arena_base=HUGE), "the arena must end below"),
        (lambda: replace(rank(), arena_bytes=0), "arena_bytes=0"),
        (lambda: replace(rank(), arena_bytes=HUGE), "the arena must end below"),
        (lambda: replace(rank(), arena_base=(1 << 62) - 1, arena_bytes=2), "the arena must end below"),
        (lambda: replace(rank(), fields=()), "placement fields: 0 entries"),
        (lambda: replace(rank(), block_counts=()), "block_counts: 0 entries"),
        (lambda: replace(rank(), fields=rank().fields * 2), 'placement fields: "layers.0.k" appears twice'),
        (lambda: replace(rank(), block_counts=rank().block_counts * 2), 'block_counts: "full" appears twice'),
        (lambda: with_field(rank(), FIELD_IDS[0], offset_bytes=-1), "offset_bytes=-1"),
        (lambda: with_field(rank(), FIELD_IDS[0], offset_bytes=HUGE), "offset_bytes="),
        (lambda: with_field(rank(), FIELD_IDS[0], block_bytes=0), "block_bytes=0"),
        (lambda: with_field(rank(), FIELD_IDS[0], block_stride_bytes=BLOCK_BYTES - 1), "<= block_stride_bytes"),
        (lambda: with_field(rank(), FIELD_IDS[0], block_stride_bytes=HUGE), "< 2"),
        (lambda: with_field(rank(), FIELD_IDS[0], offset_bytes=rank().arena_bytes), "block 0 ends at byte"),
        (lambda: GroupBlockCount(group_id="full", num_blocks=0), "num_blocks=0"),
        (lambda: GroupBlockCount(group_id="full", num_blocks=1 << 31), "num_blocks=2147483648"),
        (lambda: FieldPlacement(field_id="", offset_bytes=0, block_stride_bytes=1, block_bytes=1), "field_id has 0"),
    ],
)
def test_a_placement_that_breaks_a_rule_is_refused_by_name(change: Callable[[], object], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        change()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: (), "ranks: 0 entries"),
        (lambda: (rank(), rank()), "2 placements must be ranks 0 to 1; found 0 of 1, 0 of 1"),
        (lambda: (replace(rank(), tp_size=2),), "1 placements must be ranks 0 to 0; found 0 of 2"),
        (lambda: (replace(rank(), fields=rank().fields[:3]),), '"layers.1.v" is in fields but not in rank 0'),
        (
            lambda: (replace(rank(), block_counts=(GroupBlockCount(group_id="other", num_blocks=3),)),),
            '"full" is in groups but not in rank 0: block_counts',
        ),
        (
            lambda: (with_field(rank(), FIELD_IDS[1], block_bytes=BLOCK_BYTES - 4),),
            f'"layers.0.v": block_bytes={BLOCK_BYTES - 4}, but dtype and block_shape make {BLOCK_BYTES}',
        ),
        (
            lambda: (replace(rank(), block_counts=(GroupBlockCount(group_id="full", num_blocks=11),)),),
            '"layers.1.v": its 11 blocks end at byte',
        ),
        (
            lambda: (with_field(rank(), FIELD_IDS[3], offset_bytes=rank().fields[3].offset_bytes + 1),),
            '"layers.1.v": its 10 blocks end at byte',
        ),
        (
            lambda: (with_field(rank(), FIELD_IDS[0], block_stride_bytes=1 << 61),),
            '"layers.0.k": its 10 blocks end at byte',
        ),
        (
            lambda: (with_field(rank(), FIELD_IDS[1], offset_bytes=rank().fields[1].offset_bytes - 1),),
            'group "full": fields "layers.0.k" and "layers.0.v" overlap',
        ),
        (
            lambda: (with_field(rank(), FIELD_IDS[3], offset_bytes=0),),
            'group "full": fields "layers.0.k" and "layers.1.v" overlap',
        ),
    ],
)
def test_ranks_that_do_not_fit_the_logical_part_are_refused_by_name(
    change: Callable[[], tuple[object, ...]], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        PlacementManifest(logical=logical(), ranks=change())  # type: ignore[arg-type]


def test_fields_interleaved_at_one_stride_do_not_overlap() -> None:
    stride = len(FIELD_IDS) * BLOCK_BYTES
    fields = tuple(
        replace(item, offset_bytes=index * BLOCK_BYTES, block_stride_bytes=stride)
        for index, item in enumerate(rank().fields)
    )
    PlacementManifest(logical=logical(), ranks=(replace(rank(), fields=fields),))
    shifted = (*fields[:3], replace(fields[3], offset_bytes=fields[3].offset_bytes - 1))
    with pytest.raises(ManifestError, match="overlap"):
        PlacementManifest(logical=logical(), ranks=(replace(rank(), fields=shifted),))


def test_fields_of_different_groups_may_share_bytes() -> None:
    both = replace(
        logical(),
        groups=(FULL, WINDOW),
        fields=(*(field(name) for name in FIELD_IDS[:3]), field(FIELD_IDS[3], "window")),
    )
    placement = with_field(
        replace(
            rank(),
            block_counts=(
                GroupBlockCount(group_id="full", num_blocks=10),
                GroupBlockCount(group_id="window", num_blocks=7),
            ),
        ),
        FIELD_IDS[3],
        offset_bytes=0,
    )
    PlacementManifest(logical=both, ranks=(placement,))


def test_a_partitioned_field_is_split_evenly_over_the_ranks_and_too_few_heads_are_repeated() -> None:
    assert field("f").rank_block_bytes(3) == BLOCK_BYTES // 3
    assert field("f").rank_block_bytes(6) == BLOCK_BYTES // 3
    assert replace(field("f"), partition_axis=None).rank_block_bytes(3) == BLOCK_BYTES
    with pytest.raises(ManifestError, match=r"block_shape\[1\]=3 with tp_size=2: 3 heads can neither be split over 2"):
        field("f").rank_block_bytes(2)


def test_every_section_of_an_axis_is_split_by_heads_of_its_own() -> None:
    sections = (HeadSection(num_heads=4, head_width=8), HeadSection(num_heads=1, head_width=16))
    item = replace(field("f"), block_shape=(3, 48), partition_axis=1, partition_sections=sections)
    assert item.rank_block_bytes(2) == 3 * (2 * 8 + 16) * 4


@given(
    offset_bytes=st.integers(-1, 1 << 66),
    block_stride_bytes=st.integers(-1, 1 << 66),
    num_blocks=st.integers(-1, 1 << 40),
    arena_base=st.integers(-1, 1 << 66),
    arena_bytes=st.integers(-1, 1 << 66),
)
def test_whatever_a_peer_sends_an_accepted_block_lies_inside_its_arena(
    offset_bytes: int, block_stride_bytes: int, num_blocks: int, arena_base: int, arena_bytes: int
) -> None:
    one = replace(logical(), fields=(field("f"),), stages=(StageSchema(field_ids=("f",)),))
    try:
        item = FieldPlacement(
            field_id="f", offset_bytes=offset_bytes, block_stride_bytes=block_stride_bytes, block_bytes=BLOCK_BYTES
        )
        count = GroupBlockCount(group_id="full", num_blocks=num_blocks)
        placement = replace(
            rank(), fields=(item,), block_counts=(count,), arena_base=arena_base, arena_bytes=arena_bytes
        )
        PlacementManifest(logical=one, ranks=(placement,))
    except ManifestError:
        return
    last_end = offset_bytes + (num_blocks - 1) * block_stride_bytes + BLOCK_BYTES
    assert offset_bytes >= 0
    assert last_end <= arena_bytes
    assert arena_base > 0
    assert arena_base + last_end <= 1 << 62


def test_a_manifest_is_built_from_a_memory_plan() -> None:
    full = CacheGroupSpec(
        group_id="full",
        family=CacheFamily.HISTORY,
        retention=CacheRetention.FULL_HISTORY,
        rows_per_page=16,
        entry_stride_tokens=1,
    )
    fields = tuple(
        CacheFieldSpec(field_id=name, dtype="bfloat16", block_shape=(16, 2, 8), partition_axis=1)
        for name in ("layers.0.k", "layers.0.v")
    )
    plan = pack([(full, fields)], prefix_granularity=64).bind(num_lcm_blocks=5)
    built = build_manifest(
        plan,
        stages=[["layers.0.k", "layers.0.v"]],
        model_fingerprint="abc",
        weight_version="w1",
        arena_base=1 << 30,
        data_plane="memory",
        endpoint="memory:4",
    )
    assert built.logical.groups == (replace(FULL, block_granularity=16),)
    assert built.logical.prefix_granularity == 64
    assert built.logical.fields[0].block_shape == (16, 2, 8)
    assert built.logical.stages == (StageSchema(field_ids=("layers.0.k", "layers.0.v")),)
    (placement,) = built.ranks
    assert (placement.arena_base, placement.arena_bytes) == (1 << 30, plan.num_arena_bytes)
    assert (placement.endpoint, placement.data_plane) == ("memory:4", "memory")
    assert placement.find_num_blocks("full") == plan.num_blocks("full")
    planned = plan.field("layers.0.v")
    assert placement.find_field("layers.0.v") == FieldPlacement(
        field_id="layers.0.v",
        offset_bytes=planned.offset_bytes,
        block_stride_bytes=planned.block_stride_bytes,
        block_bytes=planned.block_bytes,
    )


def test_a_plan_whose_fields_share_planes_describes_itself_and_its_layers_coalesce_per_block() -> None:
    recipe = SlidingFullCacheRecipe(
        num_layers=6,
        row_fields=key_value_fields(1, 4),
        dtype="float32",
        prefix_granularity=8,
        memory_bytes=1 << 16,
        is_sliding=(True,) * 5 + (False,),
        sliding_window_tokens=16,
    )
    setup = recipe.setup()
    manifest = build_manifest(
        setup.plan,
        stages=setup.producer_fields_by_step,
        model_fingerprint="abc",
        weight_version="",
        arena_base=1 << 20,
        data_plane="memory",
        endpoint="memory:1",
    )
    (rank,) = manifest.ranks
    sliding = [item.field_id for item in manifest.logical.fields if item.group_id == "sliding"]
    runs = coalesce(plan_block_runs(rank, rank, sliding, [3, 9], [5, 2], group_id="sliding"))
    block_bytes = setup.plan.group_layout("sliding").block_bytes
    assert sum(run.length_bytes for run in runs) == 2 * block_bytes
    # Two planes, keys and values of all five layers side by side in each.
    assert len(runs) == 4


def test_a_sharded_group_has_no_manifest() -> None:
    recipe = DenseCacheRecipe(
        prefix_granularity=16,
        memory_bytes=1 << 20,
        num_layers=1,
        row_fields=key_value_fields(1, 8),
        dtype="float32",
        shard_count=2,
    )
    setup = recipe.setup()
    with pytest.raises(ManifestError, match='group "full": shard_count must be 1 in a handoff, got 2'):
        build_manifest(
            setup.plan,
            stages=setup.producer_fields_by_step,
            model_fingerprint="abc",
            weight_version="",
            arena_base=1 << 20,
            data_plane="memory",
            endpoint="memory:4",
        )
