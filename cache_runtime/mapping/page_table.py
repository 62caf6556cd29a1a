"""Token-shaped addressing: from (row, position) pairs through a table to cache rows.

The one spelling of the invariant `table[row, pos // span] * stride + pos % span`, with one row per token, which gives
the same row whether the table holds blocks (block_granularity, block_stride_rows) or pages (kernel_page_size both
times). Pure functions, fail-closed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cache_runtime.mapping.batch_metadata import Int32Array

Int64Array = npt.NDArray[np.int64]

SKIP_LOCATION = -1
"""Row index of a token that has no storage: writers skip it, readers mask it."""


def resolve_token_locations(
    table: Int32Array, token_rows: Int64Array, positions: Int64Array, *, span: int, stride_rows: int
) -> Int64Array:
    """int64[tokens] row indices into a group's flattened rows.

    `table`: int32[rows, slots] of block or page ids, each spanning `span` tokens and beginning `stride_rows` rows after
    the one before. Token t is at `positions[t]` of row `token_rows[t]`. Holes, padding, and positions outside the table
    resolve to SKIP_LOCATION.
    """
    num_slots = table.shape[1]
    if num_slots == 0:
        return np.full(positions.shape, SKIP_LOCATION, dtype=np.int64)
    slots, offsets = np.divmod(positions, span)
    in_table = (slots >= 0) & (slots < num_slots)
    # Widened before the multiplication: a row index may exceed the int32 range.
    ids = table[token_rows, np.where(in_table, slots, 0)].astype(np.int64)
    return np.where(in_table & (ids > 0), ids * stride_rows + offsets, SKIP_LOCATION)
