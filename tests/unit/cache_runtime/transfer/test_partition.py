"""Handing a cache from so many tensor ranks to so many others: every byte from one writer, and the right one.

The expectation is written down without the planner: each rank's tensor is cut from the whole one by index lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.base import CacheLayerType, CacheRecipe, CacheSetup
from cache_runtime.recipes.dense import DenseCacheRecipe
from cache_runtime.recipes.hybrid import HybridCacheRecipe, StateField
from cache_runtime.recipes.partition import HeadSection, TensorRank
from cache_runtime.recipes.plan import CacheMemoryPlan
from cache_runtime.recipes.rows import RowField, key_value_fields
from cache_runtime.recipes.sliding_full import SlidingFullCacheRecipe
from cache_runtime.transfer.manifest_builder import describe_cache, place_rank
from cache_runtime.transfer.partition import field_strips, plan_strips
from cache_runtime.transfer.planner import PlanError, coalesce, plan_block_runs
from cache_runtime.transfer.schema import FieldSchema, LogicalManifest, PlacementManifest, RankPlacement

Recipes = Callable[[TensorRank, int], CacheRecipe]
GRAIN = 4


def dense(num_kv_heads: int) -> Recipes:
    return lambda rank, memory_bytes: DenseCacheRecipe(
        prefix_granularity=GRAIN,
        memory_bytes=memory_bytes,
        num_layers=2,
        row_fields=key_value_fields(num_kv_heads, 3),
        dtype="float32",
        tensor_rank=rank,
    )


def sliding(num_kv_heads: int) -> Recipes:
    return lambda rank, memory_bytes: SlidingFullCacheRecipe(
        prefix_granularity=GRAIN,
        memory_bytes=memory_bytes,
        num_layers=6,
        row_fields=key_value_fields(num_kv_heads, 2),
        dtype="float32",
        is_sliding=(True,) * 5 + (False,),
        sliding_window_tokens=2 * GRAIN,
        tensor_rank=rank,
    )


def states(num_kv_heads: int, num_shared_heads: int) -> Recipes:
    """A convolution over values, and keys and queries that belong to fewer heads, beside rows of attention."""
    shared = HeadSection(num_heads=num_shared_heads, head_width=3)
    sections = (HeadSection(num_heads=4, head_width=2), shared, shared)
    return lambda rank, memory_bytes: HybridCacheRecipe(
        prefix_granularity=GRAIN,
        memory_bytes=memory_bytes,
        num_layers=2,
        row_fields=key_value_fields(num_kv_heads, 3),
        dtype="float32",
        layer_kinds=(CacheLayerType.STATE, CacheLayerType.FULL),
        state_fields=(
            StateField(
                name="conv_state",
                block_shape=(3, sum(section.extent for section in sections)),
                partition_axis=1,
                sections=sections,
            ),
            StateField(name="recurrent_state", block_shape=(4, 3, 2), partition_axis=0),
        ),
        tensor_rank=rank,
    )


def latent(rank: TensorRank, memory_bytes: int) -> CacheRecipe:
    return DenseCacheRecipe(
        prefix_granularity=GRAIN,
        memory_bytes=memory_bytes,
        num_layers=2,
        row_fields=(RowField(name="latent", row_shape=(5,)),),
        dtype="float32",
        tensor_rank=rank,
    )


FAMILIES: Mapping[str, Recipes] = {
    "full": dense(4),
    "full, one head": dense(1),
    "sliding": sliding(2),
    "sliding, one head": sliding(1),
    "states": states(2, 2),
    "states, shared heads and kv heads repeated": states(1, 1),
    "latent": latent,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of several tensor ranks, each with an arena in NumPy."""

    setups: tuple[CacheSetup, ...]
    manifest: PlacementManifest
    arenas: tuple[npt.NDArray[np.uint8], ...]

    def rank(self, rank: int) -> RankPlacement:
        return self.manifest.ranks[rank]

    def block_in(self, group_id: str, parent: int) -> int:
        """The first block of a parent, which no other group uses meanwhile."""
        return 1 + (parent - 1) * self.setups[0].plan.group_layout(group_id).cache_blocks_per_lcm_block

    def block(self, rank: int, field_id: str, block: int) -> npt.NDArray[np.float32]:
        """A view."""
        field = self.setups[rank].plan.field(field_id)
        begin = field.offset_bytes + block * field.block_stride_bytes
        raw = self.arenas[rank][begin : begin + field.block_bytes]
        return raw.view(np.float32).reshape(field.block_shape)


def make_node(recipes: Recipes, size: int, *, memory_bytes: int, base: int) -> Node:
    setups = tuple(recipes(TensorRank(rank=rank, size=size), memory_bytes).setup() for rank in range(size))
    ranks = tuple(
        place_rank(
            setup.plan,
            TensorRank(rank=rank, size=size),
            arena_base=base + (rank << 24),
            data_plane="memory",
            endpoint=f"memory:{rank}",
        )
        for rank, setup in enumerate(setups)
    )
    manifest = PlacementManifest(logical=describe(setups[0]), ranks=ranks)
    arenas = tuple(np.zeros(setup.plan.num_arena_bytes, dtype=np.uint8) for setup in setups)
    return Node(setups=setups, manifest=manifest, arenas=arenas)


def describe(setup: CacheSetup) -> LogicalManifest:
    return describe_cache(setup.plan, stages=setup.producer_fields_by_step, model_fingerprint="abc", weight_version="")


def share(item: FieldSchema, whole: npt.NDArray[np.float32], rank: int, size: int) -> npt.NDArray[np.float32]:
    if item.partition_axis is None:
        return whole
    return whole.take(rank_indices(item, rank, size), axis=item.partition_axis)


def rank_indices(item: FieldSchema, rank: int, size: int) -> list[int]:
    """Which elements of the whole axis a rank has, in order: spelled out head by head."""
    indices, begin = [], 0
    for section in item.sections:
        if section.num_heads >= size:
            per_rank = section.num_heads // size
            heads = list(range(rank * per_rank, (rank + 1) * per_rank))
        else:
            heads = [rank // (size // section.num_heads)]
        for head in heads:
            indices += range(begin + head * section.head_width, begin + (head + 1) * section.head_width)
        begin += section.extent
    return indices


def fill(node: Node, group_blocks: Mapping[str, list[int]]) -> dict[tuple[str, int], npt.NDArray[np.float32]]:
    """Random whole blocks, cut up over the ranks of the node; the whole ones by field and place in the list."""
    random, whole = np.random.default_rng(5), {}
    for item in node.manifest.logical.fields:
        for index, block in enumerate(group_blocks[item.group_id]):
            values = random.standard_normal(item.block_shape, dtype=np.float32)
            whole[item.field_id, index] = values
            for rank in range(len(node.setups)):
                node.block(rank, item.field_id, block)[:] = share(item, values, rank, len(node.setups))
    return whole


def transfer(
    source: Node, target: Node, blocks: Mapping[str, tuple[list[int], list[int]]]
) -> list[npt.NDArray[np.int64]]:
    """Carries out the plans of all pairs of ranks. How often each byte of each target arena was written."""
    logical = source.manifest.logical
    num_writes = [np.zeros(arena.size, dtype=np.int64) for arena in target.arenas]
    for ours, theirs in itertools.product(source.manifest.ranks, target.manifest.ranks):
        strips = plan_strips(logical, ours.tensor_rank, theirs.tensor_rank)
        for group_id, (from_blocks, to_blocks) in blocks.items():
            field_ids = [item.field_id for item in logical.fields if item.group_id == group_id]
            runs = plan_block_runs(ours, theirs, field_ids, from_blocks, to_blocks, group_id=group_id, strips=strips)
            for run in coalesce(runs):
                begin, to_begin = run.source_address - ours.arena_base, run.target_address - theirs.arena_base
                moved = source.arenas[ours.tp_rank][begin : begin + run.length_bytes]
                target.arenas[theirs.tp_rank][to_begin : to_begin + run.length_bytes] = moved
                num_writes[theirs.tp_rank][to_begin : to_begin + run.length_bytes] += 1
    return num_writes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("prefill", "decode"), [*itertools.product((1, 2), repeat=2), (4, 2), (2, 4)])
def test_every_rank_of_the_target_gets_its_part_of_every_field_from_one_writer(
    family: str, prefill: int, decode: int
) -> None:
    source = make_node(FAMILIES[family], prefill, memory_bytes=1 << 16, base=1 << 30)
    target = make_node(FAMILIES[family], decode, memory_bytes=3 << 15, base=1 << 40)
    blocks = {
        group.group_id: (
            [source.block_in(group.group_id, 4 * index + parent) for parent in (2, 3, 1)],
            [target.block_in(group.group_id, 4 * index + parent) for parent in (1, 2, 4)],
        )
        for index, group in enumerate(source.manifest.logical.groups)
    }
    whole = fill(source, {group_id: ids for group_id, (ids, _) in blocks.items()})

    num_writes = transfer(source, target, blocks)

    for item in target.manifest.logical.fields:
        for index, block in enumerate(blocks[item.group_id][1]):
            for rank in range(decode):
                expected = share(item, whole[item.field_id, index], rank, decode)
                assert np.array_equal(target.block(rank, item.field_id, block), expected)
    for counts in num_writes:
        assert counts.max() == 1


def test_nothing_but_the_granted_blocks_of_a_target_changes() -> None:
    source = make_node(FAMILIES["full"], 1, memory_bytes=1 << 16, base=1 << 30)
    target = make_node(FAMILIES["full"], 2, memory_bytes=1 << 16, base=1 << 40)
    fill(source, {"full": [1]})
    for counts, setup in zip(transfer(source, target, {"full": ([1], [3])}), target.setups, strict=True):
        assert counts.sum() == setup.plan.group_layout("full").block_bytes


def test_ranks_of_equal_nodes_move_whole_blocks_that_coalesce() -> None:
    node = make_node(FAMILIES["full"], 2, memory_bytes=1 << 16, base=1 << 30)
    strips = plan_strips(node.manifest.logical, TensorRank(rank=1, size=2), TensorRank(rank=1, size=2))
    field_ids = [item.field_id for item in node.manifest.logical.fields]
    cut = plan_block_runs(node.rank(1), node.rank(1), field_ids, [1, 2], [3, 4], strips=strips)
    assert cut == plan_block_runs(node.rank(1), node.rank(1), field_ids, [1, 2], [3, 4])
    across = plan_strips(node.manifest.logical, TensorRank(rank=0, size=2), TensorRank(rank=1, size=2))
    assert not plan_block_runs(node.rank(0), node.rank(1), field_ids, [1, 2], [3, 4], strips=across)


def test_what_all_ranks_of_a_source_hold_is_written_by_different_ranks_to_different_targets() -> None:
    item = FieldSchema(field_id="f", group_id="g", dtype="float32", block_shape=(2, 3))
    ranks = [TensorRank(rank=rank, size=2) for rank in range(2)]
    writers = [[len(field_strips(item, ours, theirs)) for ours in ranks] for theirs in ranks]
    assert writers == [[1, 0], [0, 1]]


def test_a_head_slice_is_one_strip_per_row() -> None:
    item = FieldSchema(field_id="k", group_id="g", dtype="float32", block_shape=(2, 4, 3), partition_axis=1)
    strips = field_strips(item, TensorRank(), TensorRank(rank=1, size=2))
    assert strips.tolist() == [[24, 0, 24], [72, 24, 24]]


def test_strips_outside_a_block_are_refused() -> None:
    node = make_node(FAMILIES["full"], 1, memory_bytes=1 << 16, base=1 << 30)
    outside = {"layers.0.k": np.array([[0, 8, 1 << 20]], dtype=np.int64)}
    with pytest.raises(PlanError, match=r'"layers\.0\.k": a strip ends at byte 1048576 of the source block'):
        plan_block_runs(node.rank(0), node.rank(0), ["layers.0.k"], [1], [1], strips=outside)


@pytest.mark.parametrize("num_heads", [3, 5])
def test_heads_that_do_not_share_out_are_refused_by_the_recipe_with_both_values(num_heads: int) -> None:
    with pytest.raises(CacheConfigError, match=rf'"layers.0.k": {num_heads} heads can neither be split over 2'):
        dense(num_heads)(TensorRank(size=2), 1 << 16).setup()


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(CacheConfigError, match=r"tensor rank 2 is outside \[0, 2\)"):
        TensorRank(rank=2, size=2)


def test_a_plan_with_sections_survives_its_json_form() -> None:
    plan = FAMILIES["states"](TensorRank(rank=1, size=2), 1 << 16).setup().plan
    assert CacheMemoryPlan.from_dict(plan.to_dict()) == plan
