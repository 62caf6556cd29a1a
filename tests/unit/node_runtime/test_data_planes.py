"""Which data planes a node opens, by its configuration and by what its machine has."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.certificates import DOMAIN, MeshAuthority, make_tls_files

from cache_runtime.transfer.engine import DataPlaneUnavailable, MissingDataPlane, TransferEngine
from cache_runtime.transfer.plane_set import PlaneSet
from cache_runtime.transfer.shm_engine import host_id
from node_runtime.config import ComputeNodeConfig
from node_runtime.engine import data_planes
from node_runtime.engine.data_planes import known_to_older_releases, open_planes, tls_of


@pytest.fixture
def opened() -> Iterator[list[PlaneSet]]:
    sets: list[PlaneSet] = []
    yield sets
    for planes in sets:
        planes.close()


def names(planes: PlaneSet) -> list[str]:
    return [engine.name for engine in planes.engines]


def config(**values: object) -> ComputeNodeConfig:
    return ComputeNodeConfig(model="m", **values)


def test_by_default_a_node_offers_what_its_machine_allows(opened: list[PlaneSet]) -> None:
    opened.append(open_planes(config()))
    assert names(opened[0]) == ["shm", "stream", "mooncake"]
    assert known_to_older_releases(opened[0]).name == "mooncake"
    assert opened[0].offers[0].host_id == host_id() != ""


def test_without_the_mooncake_package_a_node_starts_with_the_others(
    opened: list[PlaneSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    opened.append(open_planes(config()))
    assert names(opened[0]) == ["shm", "stream"]
    assert known_to_older_releases(opened[0]).name == "shm"
    with pytest.raises(MissingDataPlane, match="pip install"):
        open_planes(config(data_plane="mooncake"))


def test_rdma_that_is_asked_for_is_not_passed_over() -> None:
    with pytest.raises(DataPlaneUnavailable, match="lists none"):
        open_planes(config(transfer_protocol="rdma"))


@pytest.mark.parametrize("name", ["shm", "stream", "mooncake", "memory"])
def test_a_plane_that_is_asked_for_is_the_only_one(opened: list[PlaneSet], name: str) -> None:
    opened.append(open_planes(config(data_plane=name)))
    assert names(opened[0]) == [name]


def test_a_plane_is_opened_where_and_how_the_configuration_says(
    opened: list[PlaneSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    stream = {"data_plane": "stream", "data_plane_port": port, "advertise_host": "localhost"}
    opened.append(open_planes(config(**stream)))
    assert [offer.endpoint for offer in opened[0].offers] == [f"localhost:{port}"]
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    asked: dict[str, object] = {}

    def refuse(name: str, **settings: object) -> TransferEngine:
        asked.update(settings, name=name)
        raise DataPlaneUnavailable("not here")

    monkeypatch.setattr(data_planes, "create_engine", refuse)
    with pytest.raises(DataPlaneUnavailable):
        open_planes(config(data_plane="mooncake", transfer_protocol="rdma", rdma_device="mlx5_1"))
    assert (asked["name"], asked["protocol"], asked["device"]) == ("mooncake", "rdma", "mlx5_1")


def test_a_node_with_certificates_opens_no_unencrypted_port(opened: list[PlaneSet], tmp_path: Path) -> None:
    files = make_tls_files(tmp_path)
    tls = {
        "data_plane_tls_cert": str(files.certificate),
        "data_plane_tls_key": str(files.key),
        "data_plane_tls_ca": str(files.authority),
    }
    opened.append(open_planes(config(**tls)))
    assert [(offer.name, offer.protocol) for offer in opened[0].offers] == [("shm", "unix"), ("stream", "tls")]
    files.key.unlink()
    with pytest.raises(DataPlaneUnavailable, match=r"node\.key"):
        open_planes(config(data_plane="stream", **tls))


def test_the_certificates_of_a_nodes_calls_encrypt_its_stream_as_well(opened: list[PlaneSet], tmp_path: Path) -> None:
    settings = MeshAuthority(tmp_path).settings("decode")
    opened.append(open_planes(config(**settings)))
    assert [(offer.name, offer.protocol) for offer in opened[0].offers] == [("shm", "unix"), ("stream", "tls")]
    files = tls_of(config(**settings))
    assert files is not None
    assert (files.receiver_name, files.writer_name) == (DOMAIN, f"prefill.{DOMAIN}")
    opened.append(open_planes(config(**settings, data_plane_tls="off")))
    assert ("stream", "tcp") in [(offer.name, offer.protocol) for offer in opened[1].offers]


def test_files_of_its_own_win_and_name_the_host(tmp_path: Path) -> None:
    own = {f"data_plane_tls_{name}": f"/own/{name}" for name in ("cert", "key", "ca")}
    files = tls_of(config(**MeshAuthority(tmp_path).settings("decode"), **own))
    assert files is not None
    assert (files.certificate, files.receiver_name, files.writer_name) == (Path("/own/cert"), None, None)


def test_rdma_that_is_asked_for_is_not_passed_over_for_encryption(tmp_path: Path) -> None:
    with pytest.raises(DataPlaneUnavailable, match="lists none"):
        open_planes(config(transfer_protocol="rdma", **MeshAuthority(tmp_path).settings("decode")))
