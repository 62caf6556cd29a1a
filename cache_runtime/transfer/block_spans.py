"""Where blocks lie in an arena: what a receiver allows when it grants them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .engine import Spans
from .schema import LogicalManifest, RankPlacement


def block_spans(logical: LogicalManifest, placement: RankPlacement, block_ids: Mapping[str, Sequence[int]]) -> Spans:
    """int64[num_spans, 2]: every field of every block, by group id, as addresses of the rank. Unknown groups are none.

    Ids must be inside their groups; see `PlacementManifest`, which proves that the blocks are then inside the arena.
    """
    ids = {group_id: np.asarray(members, dtype=np.int64) for group_id, members in block_ids.items()}
    spans = []
    for item in logical.fields:
        field = placement.find_field(item.field_id)
        members = ids.get(item.group_id)
        if field is None or members is None:
            continue
        begins = placement.arena_base + field.offset_bytes + members * field.block_stride_bytes
        spans.append(np.stack((begins, begins + field.block_bytes), axis=1))
    return np.concatenate(spans) if spans else np.empty((0, 2), dtype=np.int64)
