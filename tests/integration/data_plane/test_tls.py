"""Who may connect to a stream that is encrypted, which files it needs, and what becomes of those that are replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from integration.data_plane.planes import Memory
from support.certificates import DOMAIN, MeshAuthority, make_tls_files

from cache_runtime.transfer.engine import DataPlaneUnavailable, PeerUnreachable, Region, Run, TransferRejected
from cache_runtime.transfer.socket_engine import SocketEngine
from cache_runtime.transfer.stream_engine import open_stream_engine
from cache_runtime.transfer.stream_tls import TlsFiles


def test_only_certificates_of_the_same_authority_are_served(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    ours, others = (make_tls_files(tmp_path_factory.mktemp("tls")) for _ in range(2))
    region = Region(base_address=1 << 40, num_bytes=4096)
    server = open_stream_engine("127.0.0.1", bind_host="127.0.0.1", tls=ours)
    for client in (
        open_stream_engine("127.0.0.1", bind_host="127.0.0.1", tls=others),
        open_stream_engine("127.0.0.1", bind_host="127.0.0.1"),
    ):
        with pytest.raises(PeerUnreachable, match=server.endpoint):
            client.open_peer(server.endpoint, [region])
        client.close()
    plain = open_stream_engine("127.0.0.1", bind_host="127.0.0.1")
    friend = open_stream_engine("127.0.0.1", bind_host="127.0.0.1", tls=ours)
    with pytest.raises(PeerUnreachable, match=plain.endpoint):
        friend.open_peer(plain.endpoint, [region])
    with pytest.raises(TransferRejected, match="does not expose"):
        friend.open_peer(server.endpoint, [region])
    for engine in (server, plain, friend):
        engine.close()


def test_a_certificate_for_another_host_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    files = make_tls_files(tmp_path_factory.mktemp("tls"), name="other.example")
    server = open_stream_engine("127.0.0.1", bind_host="127.0.0.1", tls=files)
    with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1"):
        server.open_peer(server.endpoint, [Region(base_address=1 << 40, num_bytes=4096)])
    server.close()


def test_tls_files_that_cannot_be_used_are_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tls")
    files = make_tls_files(folder)
    files.key.write_text("nonsense")
    with pytest.raises(DataPlaneUnavailable, match=r"node\.key"):
        open_stream_engine("127.0.0.1", tls=files)
    missing = TlsFiles(certificate=folder / "none", key=folder / "none", authority=folder / "none")
    with pytest.raises(DataPlaneUnavailable, match="none"):
        open_stream_engine("127.0.0.1", tls=missing)


KEY = b"k" * 16
NUM_BYTES = 1 << 16


def mesh_files(authority: MeshAuthority, role: str, *, receiver_name: str = DOMAIN) -> TlsFiles:
    """As a node of the mesh uses those of its calls."""
    certificate, key = authority.issue(role)
    return TlsFiles(
        certificate=certificate,
        key=key,
        authority=authority.path,
        receiver_name=receiver_name,
        writer_name=f"prefill.{DOMAIN}",
    )


def open_engine(files: TlsFiles) -> SocketEngine:
    return open_stream_engine("127.0.0.1", bind_host="127.0.0.1", tls=files)


class Receiver:
    """A decode node's end, which takes what is written under KEY."""

    def __init__(self, files: TlsFiles) -> None:
        self.memory = Memory(NUM_BYTES)
        self._sources: list[Memory] = []
        self.engine = open_engine(files)
        self.memory.register_with(self.engine)
        region = self.memory.region
        self._permit = self.engine.allow(KEY, np.array([(region.base_address, region.end_address)], dtype=np.int64))

    def takes_from(self, writer: SocketEngine, seed: int) -> bool:
        """Whether a write over a new connection lands; False when there is none."""
        source = Memory(NUM_BYTES)
        # Registered memory stays.
        self._sources.append(source)
        source.fill_with_noise(seed)
        source.register_with(writer)
        try:
            link = writer.open_peer(self.engine.endpoint, [self.memory.region])
        except PeerUnreachable:
            return False
        run = Run(source.region.base_address, self.memory.region.base_address, NUM_BYTES)
        link.write([run], key=KEY, timeout_s=20).result(20)
        link.close()
        assert (self.memory.array == source.array).all()
        return True


@pytest.mark.parametrize("role", ["prefill", "decode", "router", "client", "operator"])
def test_with_the_certificates_of_the_mesh_prefill_nodes_write_and_nobody_else(tmp_path: Path, role: str) -> None:
    authority = MeshAuthority(tmp_path)
    receiver = Receiver(mesh_files(authority, "decode"))
    writer = open_engine(mesh_files(authority, role))
    assert receiver.takes_from(writer, seed=1) == (role == "prefill")
    for engine in (writer, receiver.engine):
        engine.close()


def test_a_receiver_of_another_mesh_is_written_nothing(tmp_path: Path) -> None:
    authority = MeshAuthority(tmp_path)
    receiver = Receiver(mesh_files(authority, "decode"))
    writer = open_engine(mesh_files(authority, "prefill", receiver_name="another.mesh"))
    assert not receiver.takes_from(writer, seed=1)
    for engine in (writer, receiver.engine):
        engine.close()


def test_replaced_certificates_are_used_for_new_connections_and_open_ones_go_on(tmp_path: Path) -> None:
    first = MeshAuthority(tmp_path)
    receiver = Receiver(mesh_files(first, "decode"))
    writer = open_engine(mesh_files(first, "prefill"))
    old = Memory(NUM_BYTES)
    old.register_with(writer)
    link = writer.open_peer(receiver.engine.endpoint, [receiver.memory.region])
    # Every file is another one now, that of the authority included: nothing old would be accepted.
    renewed = MeshAuthority(tmp_path)
    renewed.issue("decode")
    assert not receiver.takes_from(open_engine_of_before(first, tmp_path), seed=2)
    renewed.issue("prefill")
    assert receiver.takes_from(writer, seed=3)
    old.fill_with_noise(4)
    run = Run(old.region.base_address, receiver.memory.region.base_address, NUM_BYTES)
    link.write([run], key=KEY, timeout_s=20).result(20)
    assert (receiver.memory.array == old.array).all()
    for engine in (writer, receiver.engine):
        engine.close()


def open_engine_of_before(authority: MeshAuthority, folder: Path) -> SocketEngine:
    """A writer that still has what the authority signed before it was replaced."""
    kept = folder / "kept"
    kept.mkdir()
    return open_engine(mesh_files(authority.copied_to(kept), "prefill"))


def test_certificates_that_are_half_written_leave_the_old_ones_in_place(tmp_path: Path) -> None:
    authority = MeshAuthority(tmp_path)
    receiver = Receiver(mesh_files(authority, "decode"))
    writer = open_engine(mesh_files(authority, "prefill"))
    (tmp_path / "decode.pem").write_text("half")
    assert receiver.takes_from(writer, seed=1)
    (tmp_path / "prefill.key").unlink()
    assert receiver.takes_from(writer, seed=2)
    for engine in (writer, receiver.engine):
        engine.close()
