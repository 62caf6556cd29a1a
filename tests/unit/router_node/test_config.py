"""What a router must be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from node_runtime.config import load_config
from node_runtime.errors import BadConfig
from router_node.config import RouterConfig

_VALUES: dict[str, object] = {"model": "/models/tiny.Q4.gguf", "fused": ["h:1"]}


def test_a_fused_node_or_a_pair_is_enough() -> None:
    load_config(RouterConfig, _VALUES)
    load_config(RouterConfig, {"model": "m", "prefill": ["h:1"], "decode": ["h:2"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fused": []}, "give at least one prefill and one decode node, or one fused node"),
        ({"fused": [], "decode": ["h:1"]}, "give at least one prefill and one decode node, or one fused node"),
        ({"fused": ["h"]}, "fused: .*host:port"),
        ({"decode": ["h:1"]}, "h:1 appears more than once"),
        ({"model": ""}, "model"),
        ({"max_prompt_bytes": "lots"}, "max_prompt_bytes: expected a size"),
        ({"poll_interval_s": 0}, "poll_interval_s"),
        ({"http": "7780"}, r"http: expected host:port with a port in \[0, 65535\]"),
    ],
)
def test_a_wrong_value_is_refused_by_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        load_config(RouterConfig, {**_VALUES, **changes})


def test_the_model_is_named_after_its_file_unless_a_name_is_given(tmp_path: Path) -> None:
    assert load_config(RouterConfig, _VALUES).model_name() == "tiny.Q4"
    assert load_config(RouterConfig, {**_VALUES, "served_model_name": "tiny"}).model_name() == "tiny"
    directory = tmp_path / "tiny-1.5"
    directory.mkdir()
    assert load_config(RouterConfig, {**_VALUES, "model": str(directory)}).model_name() == "tiny-1.5"
