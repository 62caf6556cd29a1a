"""Declaration shapes of cache groups and fields, and their refusals."""

from __future__ import annotations

import pytest

from cache_runtime.device import TORCH_DTYPES
from cache_runtime.errors import CacheConfigError
from cache_runtime.recipes.spec import (
    DTYPE_BYTES,
    CacheFamily,
    CacheFieldSpec,
    CacheGroupSpec,
    CacheRetention,
    LayerField,
    check_row_field,
    layer_field_id,
    parse_layer_field_id,
)


def history(**changes: object) -> CacheGroupSpec:
    arguments: dict[str, object] = {
        "group_id": "full",
        "family": CacheFamily.HISTORY,
        "retention": CacheRetention.FULL_HISTORY,
        "rows_per_page": 16,
        "entry_stride_tokens": 4,
    }
    return CacheGroupSpec(**(arguments | changes))  # type: ignore[arg-type]


def state(**changes: object) -> CacheGroupSpec:
    arguments: dict[str, object] = {
        "group_id": "ssm",
        "family": CacheFamily.STATE,
        "retention": CacheRetention.FULL_HISTORY,
        "checkpoint_granularity": 64,
    }
    return CacheGroupSpec(**(arguments | changes))  # type: ignore[arg-type]


SLIDING = {"retention": CacheRetention.SLIDING_WINDOW, "sliding_window_tokens": 128}


def test_a_history_group_spans_its_rows_times_their_stride() -> None:
    assert history().page_size == 64
    assert history().block_granularity == 64


def test_a_state_group_spans_its_checkpoint_granularity_and_has_no_page_size() -> None:
    assert state().block_granularity == 64
    with pytest.raises(TypeError, match=r'group "ssm".*checkpoint_granularity'):
        _ = state().page_size


def test_a_sliding_history_group_may_be_replayable() -> None:
    assert history(**SLIDING, replayable=True).sliding_window_tokens == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_id": ""}, "group_id"),
        ({"rows_per_page": None}, 'group "full": .*positive rows_per_page, got None'),
        ({"rows_per_page": 0}, 'group "full": .*positive rows_per_page, got 0'),
        ({"entry_stride_tokens": None}, "positive entry_stride_tokens, got None"),
        ({"checkpoint_granularity": 64}, "no checkpoint_granularity, got 64"),
        ({"sliding_window_tokens": 8}, "no sliding_window_tokens, got 8"),
        ({"retention": CacheRetention.SLIDING_WINDOW}, "positive sliding_window_tokens, got None"),
        (SLIDING | {"sliding_window_tokens": 0}, "positive sliding_window_tokens, got 0"),
        ({"replayable": True}, "replayable needs retention sliding_window"),
        ({"shard_count": 0}, "shard_count must be at least 1, got 0"),
    ],
)
def test_a_history_group_refuses_a_shape_that_is_not_its_own(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CacheConfigError, match=message):
        history(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_granularity": None}, 'group "ssm": .*positive checkpoint_granularity, got None'),
        ({"rows_per_page": 1}, "no rows_per_page, got 1"),
        ({"entry_stride_tokens": 1}, "no entry_stride_tokens, got 1"),
        (SLIDING, "a state group retains full_history"),
    ],
)
def test_a_state_group_refuses_rows_and_windows(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CacheConfigError, match=message):
        state(**changes)


def test_block_bytes_follow_shape_and_dtype() -> None:
    assert CacheFieldSpec(field_id="f", dtype="bfloat16", block_shape=(4, 3, 2)).block_bytes == 48


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"field_id": "", "dtype": "float32", "block_shape": (1,)}, "field_id"),
        ({"field_id": "f", "dtype": "int4", "block_shape": (1,)}, 'field "f": dtype must be one of .*got "int4"'),
        ({"field_id": "f", "dtype": "float32", "block_shape": ()}, "block_shape needs positive"),
        ({"field_id": "f", "dtype": "float32", "block_shape": (2, 0)}, "block_shape needs positive"),
        (
            {"field_id": "f", "dtype": "float32", "block_shape": (2,), "partition_axis": 1},
            r"partition_axis must be in \[0, 1\), got 1",
        ),
    ],
)
def test_a_field_refuses_what_has_no_bytes(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(CacheConfigError, match=message):
        CacheFieldSpec(**arguments)  # type: ignore[arg-type]


def test_layer_field_ids_parse_back_and_others_belong_to_no_layer() -> None:
    assert parse_layer_field_id(layer_field_id(12, "conv_state")) == LayerField(layer=12, name="conv_state")
    for other in ("layers.01.k", "layers.1", "layers.1.k.scale", "xlayers.1.k", "layers.-1.k"):
        assert parse_layer_field_id(other) is None


def test_a_row_field_must_start_with_the_groups_rows() -> None:
    check_row_field(history(), "f", (16, 2))
    with pytest.raises(CacheConfigError, match=r'field "f": block_shape \(8, 2\).*rows_per_page 16'):
        check_row_field(history(), "f", (8, 2))


def test_every_cache_dtype_has_a_torch_dtype_of_its_size() -> None:
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == dict(DTYPE_BYTES)
