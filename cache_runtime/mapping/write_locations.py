"""Where the rows of a forward's tokens are written. Pure functions over arrays, one result per token in row order."""

from __future__ import annotations

import numpy as np

from cache_runtime.mapping.batch_metadata import Int32Array
from cache_runtime.mapping.group_tables import CacheGroupGeometry
from cache_runtime.mapping.page_table import Int64Array, resolve_token_locations

DUMMY_LOCATION = 0
"""First row of the null block: what a padding token's row is written to and nobody reads."""


def span_write_locations(
    block_table: Int32Array, begins: Int32Array, input_lengths: Int32Array, geometry: CacheGroupGeometry
) -> Int64Array:
    """int64[sum(input_lengths)] write locations of row r's positions [begins[r], begins[r] + input_lengths[r]).

    Tokens without storage go to DUMMY_LOCATION.
    """
    locations = fail_closed_write_locations(block_table, begins, input_lengths, geometry)
    return np.maximum(locations, DUMMY_LOCATION)


def fail_closed_write_locations(
    block_table: Int32Array, begins: Int32Array, input_lengths: Int32Array, geometry: CacheGroupGeometry
) -> Int64Array:
    """Like `span_write_locations`, but SKIP_LOCATION for tokens without storage: for fields without a dummy row."""
    token_rows, positions = span_tokens(begins, input_lengths)
    return resolve_token_locations(
        block_table,
        token_rows,
        positions,
        span=geometry.block_granularity,
        stride_rows=geometry.block_stride_rows,
    )


def span_tokens(begins: Int32Array, input_lengths: Int32Array) -> tuple[Int64Array, Int64Array]:
    """(row, position) of every token of the spans, in row order; both int64[sum(input_lengths)]."""
    lengths = input_lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    token_rows = np.repeat(np.arange(lengths.size, dtype=np.int64), lengths)
    shifts = np.repeat(begins - (ends - lengths), lengths)
    return token_rows, np.arange(token_rows.size, dtype=np.int64) + shifts
