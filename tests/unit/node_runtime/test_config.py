"""Configuration: defaults, sizes, and refusals that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from node_runtime.config import ComputeNodeConfig, NodeConfig, format_size, load_config, parse_size
from node_runtime.errors import BadConfig


class PrefillLikeConfig(ComputeNodeConfig):
    role_name: ClassVar[str] = "prefill"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1GiB", 2**30),
        ("512MiB", 2**29),
        ("1.5 GiB", 3 * 2**29),
        ("64kib", 65536),
        ("2MB", 2_000_000),
        ("4096", 4096),
        ("7B", 7),
        (123, 123),
    ],
)
def test_sizes_are_read_as_people_write_them(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1XiB", "-1GiB", "1 2", "0.3B", True, None, 1.5, "1e9"])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected a"):
        parse_size(text)


@pytest.mark.parametrize("num_bytes", [0, 7, 1024, 2**20, 2**30, 3 * 2**29, 5 * 2**40])
def test_a_formatted_size_reads_back_as_itself(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes


def test_the_defaults_are_those_of_the_documentation() -> None:
    config = load_config(ComputeNodeConfig, {"model": "smollm2"})
    assert (config.memory, config.max_message_bytes) == (2**30, 4 * 2**20)
    assert (config.prefix_granularity, config.max_batch_size, config.token_budget) == (64, 64, 512)
    assert (config.dtype, config.weights, config.data_plane) == ("float32", "auto", "auto")
    assert config.transfer_protocol == "auto"
    assert (config.host, config.default_deadline_s, config.drain_grace_s) == ("127.0.0.1", 600, 30)


def test_the_default_node_id_names_role_and_host_and_is_fresh_each_time() -> None:
    first, second = (load_config(PrefillLikeConfig, {"model": "m", "node_id": ""}).node_id for _ in range(2))
    assert first.startswith("prefill-")
    assert first != second


def test_sizes_may_be_given_with_units_in_a_configuration() -> None:
    config = load_config(ComputeNodeConfig, {"model": "m", "memory": "512MiB", "max_message_bytes": "16MiB"})
    assert (config.memory, config.max_message_bytes) == (2**29, 2**24)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, "port: .*65535, got 70000"),
        ({"port": "x"}, "port: .*integer.*got 'x'"),
        ({"memory": "4q"}, "memory: expected a size such as 512MiB or 1GiB, got '4q'"),
        ({"memory": "1KiB"}, "memory: .*1048576"),
        ({"max_message_bytes": 1}, "max_message_bytes: .*1024, got 1"),
        ({"default_deadline_s": 0}, "default_deadline_s: .*greater than 0, got 0"),
        ({"default_deadline_s": float("nan")}, "default_deadline_s: "),
        ({"drain_grace_s": -1}, "drain_grace_s: .*0, got -1"),
        ({"max_waiting_requests": 0}, "max_waiting_requests: "),
        ({"node_id": "a b"}, "node_id: expected .*got 'a b'"),
        ({"node_id": "x" * 129}, "node_id: "),
        ({"host": ""}, "host: "),
        ({"log_level": "loud"}, "log_level: .*'debug'.*got 'loud'"),
        ({"otlp_endpoint": "nowhere"}, "otlp_endpoint: expected host:port.*got 'nowhere'"),
        ({"otlp_endpoint": "ftp://a:1"}, "otlp_endpoint: "),
        ({"dtype": "int8"}, "dtype: .*'float32'.*got 'int8'"),
        ({"prefix_granularity": 0}, "prefix_granularity: .*1, got 0"),
        ({"kernel_page_size": 0}, "kernel_page_size: "),
        ({"max_batch_size": 0}, "max_batch_size: "),
        ({"token_budget": 0}, "token_budget: "),
        ({"max_model_len": 1}, "max_model_len: .*2, got 1"),
        ({"adapter": ["red"]}, "adapter: expected NAME=PATH, .*got 'red'"),
        ({"adapter": ["red="]}, "adapter: expected NAME=PATH, .*got 'red='"),
        ({"adapter": ["=path"]}, "adapter: expected NAME=PATH, .*got '=path'"),
        ({"adapter": ["a b=path"]}, "adapter: expected NAME=PATH, .*got 'a b=path'"),
        ({"adapter": ["red=a", "red=b"]}, 'adapter: expected every name once, got "red" 2 times'),
        ({"num_threads": 0}, "num_threads: "),
        ({"data_plane": "pigeon"}, "data_plane: .*'mooncake'.*got 'pigeon'"),
        ({"transfer_protocol": "udp"}, "transfer_protocol: "),
        ({"rdma_device": "mlx5_0"}, "rdma_device='mlx5_0' needs transfer_protocol=rdma, got auto"),
        ({"data_plane_tls_cert": "a.pem"}, "data_plane_tls_ca go together"),
        (
            {"data_plane_tls": "off", **{f"data_plane_tls_{name}": "x" for name in ("cert", "key", "ca")}},
            "data_plane_tls_cert needs data_plane_tls=auto, got off",
        ),
        (
            {"data_plane": "shm", **{f"data_plane_tls_{name}": "x" for name in ("cert", "key", "ca")}},
            "data_plane_tls_cert needs data_plane=stream or auto, got shm",
        ),
        ({"token_budget": 32}, "token_budget=32 must be at least max_batch_size=64"),
        ({"memroy": "1GiB"}, "memroy: unknown key of ComputeNodeConfig"),
        ({"model": ""}, "model: "),
    ],
)
def test_each_wrong_value_is_refused_with_its_key_and_limit(values: dict[str, object], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        load_config(ComputeNodeConfig, {"model": "m", **values})


def test_a_missing_value_is_named() -> None:
    with pytest.raises(BadConfig, match="model: required"):
        load_config(ComputeNodeConfig, {})


def test_all_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(BadConfig, match=r"port.*; .*dtype.*; .*typo"):
        load_config(ComputeNodeConfig, {"model": "m", "port": -1, "dtype": "int4", "typo": 1})


def test_a_configuration_cannot_be_changed() -> None:
    config = NodeConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.port = 1  # type: ignore[misc]


def test_a_node_on_all_interfaces_advertises_a_name_that_peers_can_use() -> None:
    assert NodeConfig(host="0.0.0.0").advertised_host() != "0.0.0.0"
    assert NodeConfig(host="0.0.0.0", advertise_host="10.0.0.7").advertised_host() == "10.0.0.7"
    assert NodeConfig(host="10.0.0.8").advertised_host() == "10.0.0.8"


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4317", "http://collector:4317/", "https://c.example:443", "[::1]:4317"]
)
def test_usual_collector_endpoints_are_accepted(endpoint: str) -> None:
    assert NodeConfig(otlp_endpoint=endpoint).otlp_endpoint == endpoint.rstrip("/")


def test_adapters_are_directories_by_name() -> None:
    config = load_config(ComputeNodeConfig, {"model": "m", "adapter": ["red=/models/red", "v1.2=a=b"]})
    assert config.adapters() == {"red": Path("/models/red"), "v1.2": Path("a=b")}


def test_every_field_has_a_help_text() -> None:
    assert all(field.description for field in ComputeNodeConfig.model_fields.values())
