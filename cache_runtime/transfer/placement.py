"""Compares two manifests: what differs logically, and whether the planner can bridge what differs physically.

Pure; it only describes. Whoever bootstraps a peer decides what a non-empty answer means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from cache_runtime.recipes.partition import HeadSection

from .plane_choice import usable_offers
from .schema import FieldSchema, GroupSchema, LogicalManifest, PlacementManifest, RankPlacement

# Of each side: as many arenas as a data plane exposes beside what else a node registers.
MAX_LINKED_RANKS: Final = 32


def logical_differences(
    local: LogicalManifest, peer: LogicalManifest, *, local_name: str, peer_name: str
) -> tuple[str, ...]:
    """Every difference between two logical manifests, each with both values; empty when they agree.

    `local_name` and `peer_name` are the roles shown in front of the values, e.g.
    `group "ssm" field "conv_state": dtype prefill=bfloat16, decode=float32`. The order of groups and fields does not
    matter, the order of stages does.
    """
    return tuple(_Comparison(local_name, peer_name).manifests(local, peer))


def check_bridgeable(source: PlacementManifest, target: PlacementManifest) -> tuple[str, ...]:
    """Physical differences between two logically equal manifests that no handoff can bridge; empty when there are none.

    Bridged are other arena addresses and sizes, offsets, strides, block counts and numbers of tensor ranks: heads are
    re-cut by `partition.plan_strips`, and that they share out on either side is checked by the manifests themselves.
    Not bridged are no data plane in common, more than `MAX_LINKED_RANKS` on a side, and ranks of the target that are
    reached at several endpoints.
    """
    sides = {"source": source.ranks, "target": target.ranks}
    reasons = [
        f"tp_size {side}={len(ranks)}, limit {MAX_LINKED_RANKS}"
        for side, ranks in sides.items()
        if len(ranks) > MAX_LINKED_RANKS
    ]
    ours, theirs = source.ranks[0], target.ranks[0]
    apart = next((rank for rank in target.ranks if rank.offers != theirs.offers), None)
    if apart is not None:
        reasons.append(
            f"target ranks {theirs.tp_rank} and {apart.tp_rank}: reached at {_shown_endpoints(theirs)} and at "
            f"{_shown_endpoints(apart)}, one link must lead to all of them"
        )
    if not usable_offers(ours.offers, theirs.offers):
        reasons.append(f"data_plane source={_shown_offers(ours)}, target={_shown_offers(theirs)}")
    return tuple(reasons)


def _shown_offers(rank: RankPlacement) -> str:
    return "|".join(f"{offer.name}({offer.protocol})" if offer.protocol else offer.name for offer in rank.offers)


def _shown_endpoints(rank: RankPlacement) -> str:
    return "|".join(f"{offer.name} {offer.endpoint}" for offer in rank.offers)


class _Comparison:
    """Spells differences with the names of the two sides."""

    def __init__(self, local_name: str, peer_name: str) -> None:
        self._local_name = local_name
        self._peer_name = peer_name

    def manifests(self, local: LogicalManifest, peer: LogicalManifest) -> Iterator[str]:
        yield from self._values(
            "",
            ("model_fingerprint", local.model_fingerprint, peer.model_fingerprint),
            ("weight_version", local.weight_version, peer.weight_version),
            ("prefix_granularity", local.prefix_granularity, peer.prefix_granularity),
        )
        yield from self._groups(local, peer)
        yield from self._fields(local, peer)
        yield from self._stages(local, peer)

    def _groups(self, local: LogicalManifest, peer: LogicalManifest) -> Iterator[str]:
        ours = {group.group_id: group for group in local.groups}
        theirs = {group.group_id: group for group in peer.groups}
        for group_id in sorted(ours.keys() | theirs.keys()):
            left, right = ours.get(group_id), theirs.get(group_id)
            where = f'group "{group_id}"'
            if left is None or right is None:
                yield self._presence(where + ": ", left is not None)
            else:
                yield from self._group(where + ": ", left, right)

    def _group(self, where: str, left: GroupSchema, right: GroupSchema) -> Iterator[str]:
        return self._values(
            where,
            ("family", left.family.value, right.family.value),
            ("retention", left.retention.value, right.retention.value),
            ("block_granularity", left.block_granularity, right.block_granularity),
            ("sliding_window_tokens", left.sliding_window_tokens, right.sliding_window_tokens),
            ("replayable", left.replayable, right.replayable),
        )

    def _fields(self, local: LogicalManifest, peer: LogicalManifest) -> Iterator[str]:
        ours = {item.field_id: item for item in local.fields}
        theirs = {item.field_id: item for item in peer.fields}
        # Fields that differ in the same way share one line: a model has hundreds, and a status message is short.
        alike: dict[tuple[str, str], list[str]] = {}
        for field_id in sorted(ours.keys() | theirs.keys()):
            declared = [side[field_id] for side in (ours, theirs) if field_id in side]
            for difference in self._field(ours.get(field_id), theirs.get(field_id)):
                alike.setdefault((declared[0].group_id, difference), []).append(field_id)
        for (group_id, difference), field_ids in alike.items():
            names = ", ".join(f'"{field_id}"' for field_id in field_ids)
            yield f'group "{group_id}" field{"s" if len(field_ids) > 1 else ""} {names}: {difference}'

    def _field(self, left: FieldSchema | None, right: FieldSchema | None) -> Iterator[str]:
        if left is None or right is None:
            return iter([self._presence("", left is not None)])
        return self._values(
            "",
            ("group_id", left.group_id, right.group_id),
            ("dtype", left.dtype, right.dtype),
            ("block_shape", _shape(left.block_shape), _shape(right.block_shape)),
            ("partition_axis", left.partition_axis, right.partition_axis),
            ("partition_sections", _heads(left.partition_sections), _heads(right.partition_sections)),
        )

    def _stages(self, local: LogicalManifest, peer: LogicalManifest) -> Iterator[str]:
        if len(local.stages) != len(peer.stages):
            yield from self._values("stages: ", ("number", len(local.stages), len(peer.stages)))
            return
        for index, (left, right) in enumerate(zip(local.stages, peer.stages, strict=True)):
            ours, theirs = sorted(left.field_ids), sorted(right.field_ids)
            yield from self._values(f"stage {index}: ", ("field_ids", ",".join(ours), ",".join(theirs)))

    def _values(self, where: str, *rows: tuple[str, object, object]) -> Iterator[str]:
        for name, left, right in rows:
            if left != right:
                yield f"{where}{name} {self._local_name}={_shown(left)}, {self._peer_name}={_shown(right)}"

    def _presence(self, where: str, local_has_it: bool) -> str:
        left, right = ("present", "missing") if local_has_it else ("missing", "present")
        return f"{where}{self._local_name}={left}, {self._peer_name}={right}"


def _shape(extents: tuple[int, ...]) -> str:
    return _listed(map(str, extents))


def _listed(values: Iterable[str]) -> str:
    return "[" + ", ".join(values) + "]"


def _heads(sections: tuple[HeadSection, ...]) -> str | None:
    return _listed(f"{section.num_heads} x {section.head_width}" for section in sections) if sections else None


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return '""' if value == "" else str(value)
