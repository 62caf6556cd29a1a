"""Configuration of decode and fused nodes."""

from __future__ import annotations

import pytest

from decode_node.config import DecodeNodeConfig, FusedNodeConfig
from node_runtime.config import load_config
from node_runtime.errors import BadConfig


def test_prefill_addresses_are_kept_in_order_and_once() -> None:
    config = load_config(DecodeNodeConfig, {"model": "m", "prefill": ["b:2", "a:1", "b:2"]})
    assert config.prefill == ("b:2", "a:1")
    assert config.node_id.startswith("decode-")


@pytest.mark.parametrize("address", ["nowhere", "host:0", "host:99999", "http://host:1", ""])
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(BadConfig, match="prefill"):
        load_config(DecodeNodeConfig, {"model": "m", "prefill": [address]})


def test_a_fused_node_has_no_prefill_addresses() -> None:
    with pytest.raises(BadConfig, match="prefill: unknown key"):
        load_config(FusedNodeConfig, {"model": "m", "prefill": ["a:1"]})
