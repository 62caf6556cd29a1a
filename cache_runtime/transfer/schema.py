"""What a node's cache looks like to a peer: the placement manifest as frozen, fully checked values.

Mirrors `protos/pdmesh/v1/cache.proto` field for field. A manifest usually comes from a peer that is not trusted, so
every value is bounded here before anyone computes an address from it: once a manifest exists, each block of each field
lies inside the arena it describes. Knows no torch, no engine and no wire format; the codec lives with the RPC layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.partition import HeadSection, TensorRank
from cache_runtime.recipes.spec import DTYPE_BYTES, CacheFamily, CacheRetention

from .engine import MAX_ADDRESS
from .manifest_rules import (
    MAX_BLOCK_AXES,
    MAX_FIELDS,
    MAX_GROUPS,
    MAX_NAME_CHARS,
    MAX_OFFERS,
    MAX_RANKS,
    MAX_SECTIONS,
    ManifestError,
    check_count,
    check_name,
    check_same_names,
    check_size,
    check_unique,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSchema:
    """One attention structure of the model. Token spans as in the scheduler's group configuration."""

    group_id: str
    family: CacheFamily
    retention: CacheRetention
    block_granularity: int
    sliding_window_tokens: int | None = None
    replayable: bool = False

    def __post_init__(self) -> None:
        where = f'group "{self.group_id}"'
        check_name("group_id", self.group_id)
        check_count(f"{where}: block_granularity", self.block_granularity)
        sliding = self.retention is CacheRetention.SLIDING_WINDOW
        if sliding != (self.sliding_window_tokens is not None):
            raise ManifestError(
                f"{where}: sliding_window_tokens={self.sliding_window_tokens} with retention={self.retention.value}; "
                "it belongs to sliding_window and to nothing else"
            )
        if self.sliding_window_tokens is not None:
            check_count(f"{where}: sliding_window_tokens", self.sliding_window_tokens)
        if self.replayable and not sliding:
            raise ManifestError(f"{where}: replayable with retention={self.retention.value}; needs sliding_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSchema:
    """One tensor per block of a group; `block_shape` is the extent over all ranks.

    `partition_sections` say what the axis that ranks split is made of; none: as many heads of one element.
    """

    field_id: str
    group_id: str
    dtype: str
    block_shape: tuple[int, ...]
    partition_axis: int | None = None
    partition_sections: tuple[HeadSection, ...] = ()

    def __post_init__(self) -> None:
        where = f'field "{self.field_id}"'
        check_name("field_id", self.field_id)
        check_name(f"{where}: group_id", self.group_id)
        if self.dtype not in DTYPE_BYTES:
            raise ManifestError(f'{where}: dtype "{self.dtype}" is not one of {", ".join(DTYPE_BYTES)}')
        if not 1 <= len(self.block_shape) <= MAX_BLOCK_AXES:
            raise ManifestError(f"{where}: block_shape has {len(self.block_shape)} axes, not 1 to {MAX_BLOCK_AXES}")
        for axis, extent in enumerate(self.block_shape):
            check_count(f"{where}: block_shape[{axis}]", extent)
        if self.partition_axis is not None and not 0 <= self.partition_axis < len(self.block_shape):
            raise ManifestError(
                f"{where}: partition_axis={self.partition_axis} is outside block_shape of {len(self.block_shape)} axes"
            )
        self._check_sections(where)

    def _check_sections(self, where: str) -> None:
        if not self.partition_sections:
            return
        if self.partition_axis is None:
            raise ManifestError(f"{where}: partition_sections need a partition_axis")
        check_size(f"{where}: partition_sections", self.partition_sections, MAX_SECTIONS)
        total = sum(section.extent for section in self.partition_sections)
        extent = self.block_shape[self.partition_axis]
        if total != extent:
            raise ManifestError(
                f"{where}: partition_sections have {total} elements, block_shape[{self.partition_axis}]={extent}"
            )

    @property
    def sections(self) -> tuple[HeadSection, ...]:
        """What the partitioned axis is made of; empty for a field that every rank has whole."""
        if self.partition_axis is None or self.partition_sections:
            return self.partition_sections
        return (HeadSection(num_heads=self.block_shape[self.partition_axis]),)

    def rank_block_bytes(self, tp_size: int) -> int:
        """Bytes of one block on one of `tp_size` ranks. Raises `ManifestError` when the heads do not share out."""
        total_bytes = math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]
        if self.partition_axis is None:
            return total_bytes
        try:
            extent = sum(section.extent_on(TensorRank(size=tp_size)) for section in self.sections)
        except CacheConfigError as error:
            raise ManifestError(
                f'field "{self.field_id}": block_shape[{self.partition_axis}]={self.block_shape[self.partition_axis]} '
                f"with tp_size={tp_size}: {error}"
            ) from error
        return total_bytes // self.block_shape[self.partition_axis] * extent


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchema:
    """Fields that become complete together while a forward pass runs."""

    field_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.field_ids:
            raise ManifestError("stages: a stage has no field_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalManifest:
    """The part of a manifest on which both peers must agree."""

    model_fingerprint: str
    weight_version: str
    prefix_granularity: int
    groups: tuple[GroupSchema, ...]
    fields: tuple[FieldSchema, ...]
    stages: tuple[StageSchema, ...]

    def __post_init__(self) -> None:
        check_name("model_fingerprint", self.model_fingerprint)
        if len(self.weight_version) > MAX_NAME_CHARS:
            raise ManifestError(f"weight_version has {len(self.weight_version)} characters, limit {MAX_NAME_CHARS}")
        check_count("prefix_granularity", self.prefix_granularity)
        check_size("groups", self.groups, MAX_GROUPS)
        check_size("fields", self.fields, MAX_FIELDS)
        check_size("stages", self.stages, MAX_FIELDS)
        self._check_groups()
        self._check_stages()

    def _check_groups(self) -> None:
        group_ids = check_unique("groups", (group.group_id for group in self.groups))
        for group in self.groups:
            if self.prefix_granularity % group.block_granularity:
                raise ManifestError(
                    f'group "{group.group_id}": block_granularity={group.block_granularity} does not divide '
                    f"prefix_granularity={self.prefix_granularity}"
                )
        for item in self.fields:
            if item.group_id not in group_ids:
                raise ManifestError(f'field "{item.field_id}": group_id "{item.group_id}" is not among the groups')
        check_same_names("groups with fields", {item.group_id for item in self.fields}, "groups", group_ids)

    def _check_stages(self) -> None:
        field_ids = check_unique("fields", (item.field_id for item in self.fields))
        # The total is checked first so that a stage list cannot be longer than what it may name.
        num_staged = sum(len(stage.field_ids) for stage in self.stages)
        if num_staged > len(field_ids):
            raise ManifestError(f"stages name {num_staged} fields, there are {len(field_ids)}")
        staged = check_unique("stages", (field_id for stage in self.stages for field_id in stage.field_ids))
        check_same_names("stages", staged, "fields", field_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPlacement:
    """Where one field lies inside a rank's arena, in bytes."""

    field_id: str
    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int

    def __post_init__(self) -> None:
        where = f'field "{self.field_id}"'
        check_name("field_id", self.field_id)
        if not 0 <= self.offset_bytes < MAX_ADDRESS:
            raise ManifestError(f"{where}: offset_bytes={self.offset_bytes} is outside [0, 2**62)")
        if not 1 <= self.block_bytes <= self.block_stride_bytes < MAX_ADDRESS:
            raise ManifestError(
                f"{where}: block_bytes={self.block_bytes}, block_stride_bytes={self.block_stride_bytes}: "
                "need 1 <= block_bytes <= block_stride_bytes < 2**62"
            )

    def end_bytes(self, num_blocks: int) -> int:
        """Bytes from the arena base to the end of the last of `num_blocks` blocks."""
        return self.offset_bytes + (num_blocks - 1) * self.block_stride_bytes + self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBlockCount:
    """Number of addressable blocks of a group on a rank, the null block 0 included."""

    group_id: str
    num_blocks: int

    def __post_init__(self) -> None:
        check_name("group_id", self.group_id)
        check_count(f'block_counts "{self.group_id}": num_blocks', self.num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneOffer:
    """A data plane through which a rank can be written to."""

    name: str
    endpoint: str
    # What its connections speak; empty: not said.
    protocol: str = ""
    # Names the running host, for a plane that reaches no further; empty otherwise.
    host_id: str = ""

    def __post_init__(self) -> None:
        check_name("planes: name", self.name)
        check_name(f'plane "{self.name}": endpoint', self.endpoint)
        for field_name, value in (("protocol", self.protocol), ("host_id", self.host_id)):
            if len(value) > MAX_NAME_CHARS:
                raise ManifestError(
                    f'plane "{self.name}": {field_name} has {len(value)} characters, limit {MAX_NAME_CHARS}'
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """Physical part of a manifest for one rank: where its arena is and what lies where in it."""

    tp_rank: int
    tp_size: int
    data_plane: str
    endpoint: str
    arena_base: int
    arena_bytes: int
    fields: tuple[FieldPlacement, ...]
    block_counts: tuple[GroupBlockCount, ...]
    # Every way to write to the rank; none said (an older release): `data_plane` at `endpoint`.
    planes: tuple[PlaneOffer, ...] = ()
    # The planner looks both up for every stage of every chunk.
    _field_by_id: dict[str, FieldPlacement] = field(init=False, repr=False, compare=False)
    _num_blocks_by_group: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size <= MAX_RANKS:
            raise ManifestError(
                f"tp_rank={self.tp_rank}, tp_size={self.tp_size}: need 0 <= tp_rank < tp_size <= {MAX_RANKS}"
            )
        check_name("data_plane", self.data_plane)
        check_name("endpoint", self.endpoint)
        if self.arena_base < 1 or self.arena_bytes < 1 or self.arena_base + self.arena_bytes > MAX_ADDRESS:
            raise ManifestError(
                f"arena_base={self.arena_base:#x}, arena_bytes={self.arena_bytes}: both must be positive and the arena "
                "must end below 2**62"
            )
        if len(self.planes) > MAX_OFFERS:
            raise ManifestError(f"planes: {len(self.planes)} entries, limit {MAX_OFFERS}")
        check_unique("planes", (offer.name for offer in self.planes))
        check_size("placement fields", self.fields, MAX_FIELDS)
        check_size("block_counts", self.block_counts, MAX_GROUPS)
        check_unique("placement fields", (item.field_id for item in self.fields))
        check_unique("block_counts", (count.group_id for count in self.block_counts))
        for item in self.fields:
            if item.end_bytes(1) > self.arena_bytes:
                raise ManifestError(
                    f'field "{item.field_id}": block 0 ends at byte {item.end_bytes(1)}, arena_bytes={self.arena_bytes}'
                )
        object.__setattr__(self, "_field_by_id", {item.field_id: item for item in self.fields})
        object.__setattr__(
            self, "_num_blocks_by_group", {count.group_id: count.num_blocks for count in self.block_counts}
        )

    @property
    def offers(self) -> tuple[PlaneOffer, ...]:
        return self.planes or (PlaneOffer(name=self.data_plane, endpoint=self.endpoint),)

    @property
    def tensor_rank(self) -> TensorRank:
        return TensorRank(rank=self.tp_rank, size=self.tp_size)

    def find_field(self, field_id: str) -> FieldPlacement | None:
        return self._field_by_id.get(field_id)

    def find_num_blocks(self, group_id: str) -> int | None:
        return self._num_blocks_by_group.get(group_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementManifest:
    """Everything a peer must know to move cache to or from a node: one logical part, one placement per rank."""

    logical: LogicalManifest
    ranks: tuple[RankPlacement, ...]

    def __post_init__(self) -> None:
        check_size("ranks", self.ranks, MAX_RANKS)
        tp_sizes = {rank.tp_size for rank in self.ranks}
        if tp_sizes != {len(self.ranks)} or {rank.tp_rank for rank in self.ranks} != set(range(len(self.ranks))):
            found = ", ".join(f"{rank.tp_rank} of {rank.tp_size}" for rank in self.ranks)
            raise ManifestError(
                f"ranks: {len(self.ranks)} placements must be ranks 0 to {len(self.ranks) - 1}; found {found}"
            )
        for rank in self.ranks:
            self._check_rank(rank)

    def _check_rank(self, rank: RankPlacement) -> None:
        where = f"rank {rank.tp_rank}"
        groups = {group.group_id for group in self.logical.groups}
        fields = {item.field_id for item in self.logical.fields}
        check_same_names(f"{where}: block_counts", {count.group_id for count in rank.block_counts}, "groups", groups)
        check_same_names(f"{where}: placement fields", {item.field_id for item in rank.fields}, "fields", fields)
        by_group: dict[str, list[FieldPlacement]] = {group_id: [] for group_id in groups}
        for item in self.logical.fields:
            placement = rank._field_by_id[item.field_id]
            num_blocks = rank._num_blocks_by_group[item.group_id]
            _check_extent(where, item, placement, num_blocks, rank)
            by_group[item.group_id].append(placement)
        for group_id, placements in by_group.items():
            _check_disjoint(f'{where}: group "{group_id}"', placements, rank._num_blocks_by_group[group_id])


def _check_extent(
    where: str, item: FieldSchema, placement: FieldPlacement, num_blocks: int, rank: RankPlacement
) -> None:
    """The placement holds exactly one rank's share per block, and its last block ends inside the arena."""
    expected_bytes = item.rank_block_bytes(rank.tp_size)
    if placement.block_bytes != expected_bytes:
        raise ManifestError(
            f'{where}: field "{item.field_id}": block_bytes={placement.block_bytes}, but dtype and block_shape make '
            f"{expected_bytes}"
        )
    if placement.end_bytes(num_blocks) > rank.arena_bytes:
        raise ManifestError(
            f'{where}: field "{item.field_id}": its {num_blocks} blocks end at byte {placement.end_bytes(num_blocks)} '
            f"of an arena of arena_bytes={rank.arena_bytes}"
        )


def _check_disjoint(where: str, placements: Sequence[FieldPlacement], num_blocks: int) -> None:
    """No two fields of one group share a byte. Fields of different groups may: their blocks are used in turn.

    Fields are either planes, one after the other, or interleaved at one common stride; in the second case the bytes
    inside one stride must not meet.
    """
    ordered = sorted(placements, key=lambda item: item.offset_bytes)
    first = previous = ordered[0]
    end_bytes = first.end_bytes(num_blocks)
    for item in ordered[1:]:
        if item.offset_bytes >= end_bytes:
            first = item
        elif not (
            item.block_stride_bytes == first.block_stride_bytes
            and previous.end_bytes(1) <= item.offset_bytes
            and item.end_bytes(1) <= first.offset_bytes + first.block_stride_bytes
        ):
            raise ManifestError(f'{where}: fields "{previous.field_id}" and "{item.field_id}" overlap')
        previous, end_bytes = item, max(end_bytes, item.end_bytes(num_blocks))
