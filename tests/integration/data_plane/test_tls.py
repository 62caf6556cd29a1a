"""Who may connect to a stream that is encrypted, and which files it needs."""

from __future__ import annotations

import pytest
from support.certificates import make_tls_files

from cache_runtime.transfer.engine import DataPlaneUnavailable, PeerUnreachable, Region, TransferRejected
from cache_runtime.transfer.stream_engine import TlsFiles, open_stream_engine


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
