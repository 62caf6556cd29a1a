"""Mutual TLS between nodes: gRPC over sockets with certificates that are read again when they are replaced.

A node of role R shows a certificate with two DNS names: the mesh's domain, by which those who dial it know a node of
their mesh whatever its address, and R.domain, by which those it calls know what it may do (see `access`). Certificates
of the router carry the names its clients dial as well. Rotation: servers look at the files at every handshake, channels
when they are made, and `ChannelPool` makes them anew when `credentials_stamp` has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from node_runtime.config import NodeConfig
from node_runtime.errors import BadConfig
from node_runtime.rpc.options import channel_options, server_options
from node_runtime.rpc.transport import SocketTransport, Transport

Stamp = tuple[tuple[int, int], ...]

_log = logging.getLogger("pdmesh.tls")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: the certificate chain to show and its key (both or neither), and the authority to trust."""

    authority: Path
    certificate: Path | None = None
    key: Path | None = None

    def stamp(self) -> Stamp:
        """Changes when a file is replaced. Raises OSError."""
        found = [path.stat() for path in (self.authority, self.certificate, self.key) if path is not None]
        return tuple((status.st_mtime_ns, status.st_ino) for status in found)

    def read_authority(self) -> bytes:
        """Raises OSError."""
        return self.authority.read_bytes()

    def read_pair(self) -> tuple[bytes, bytes]:
        """Key and certificate chain. Raises OSError; ValueError when there are none."""
        if self.certificate is None or self.key is None:
            raise ValueError("no certificate is configured")
        return self.key.read_bytes(), self.certificate.read_bytes()


class TlsTransport:
    """A `Transport` whose every connection is encrypted, and authenticated on both sides if there is a certificate."""

    def __init__(self, files: TlsFiles, *, server_name: str | None, demands_client_certificate: bool = True) -> None:
        """
        Args:
            server_name: DNS name that every server dialled must have; None: the host that was dialled.
            demands_client_certificate: Whether who dials this node must show a certificate of the authority.

        Raises BadConfig when a file cannot be read.
        """
        self._files = files
        self._server_name = server_name
        self._demands_client_certificate = demands_client_certificate
        try:
            self._stamp = files.stamp()
            files.read_authority()
        except OSError as error:
            raise BadConfig(f"tls: cannot read {error.filename}: {error.strerror}") from None

    def channel(self, address: str, *, max_message_bytes: int) -> grpc.aio.Channel:
        """Raises BadConfig when a file cannot be read any more."""
        options: tuple[tuple[str, int | str], ...] = channel_options(max_message_bytes)
        if self._server_name is not None:
            options = (*options, ("grpc.ssl_target_name_override", self._server_name))
        return grpc.aio.secure_channel(address, self._channel_credentials(), options=options)

    def server(self, interceptor: grpc.aio.ServerInterceptor, *, max_message_bytes: int) -> grpc.aio.Server:
        return grpc.aio.server(interceptors=(interceptor,), options=server_options(max_message_bytes))

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        # The stub does not say that None means "as before".
        renewed = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._renewed)
        credentials = grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), renewed, self._demands_client_certificate
        )
        return server.add_secure_port(address, credentials)

    def credentials_stamp(self) -> object:
        try:
            return self._files.stamp()
        except OSError:
            # Being replaced at this moment.
            return self._stamp

    def _channel_credentials(self) -> grpc.ChannelCredentials:
        try:
            pair = (None, None) if self._files.certificate is None else self._files.read_pair()
            return grpc.ssl_channel_credentials(self._files.read_authority(), *pair)
        except OSError as error:
            raise BadConfig(f"tls: cannot read {error.filename}: {error.strerror}") from None

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        try:
            return grpc.ssl_server_certificate_configuration(
                [self._files.read_pair()], root_certificates=self._files.read_authority()
            )
        except OSError as error:
            raise BadConfig(f"tls: cannot read {error.filename}: {error.strerror}") from None

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """For the handshake that begins, on a thread of gRPC's; None: as before."""
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return None
            renewed = self._server_configuration()
        except (OSError, BadConfig) as error:
            _log.warning("certificates are being replaced or cannot be read, the old ones stay: %s", error)
            return None
        self._stamp = stamp
        _log.info("certificates were read again")
        return renewed


def tls_files_of(config: NodeConfig) -> TlsFiles | None:
    """The files that the configuration of a node names, None where it asks for no TLS."""
    if not config.tls_cert:
        return None
    return TlsFiles(authority=Path(config.tls_ca), certificate=Path(config.tls_cert), key=Path(config.tls_key))


def transport_for(config: NodeConfig) -> Transport:
    """What the configuration of a node asks for. Raises BadConfig when a file cannot be read."""
    files = tls_files_of(config)
    if files is None:
        return SocketTransport()
    return TlsTransport(
        files, server_name=config.tls_domain, demands_client_certificate=config.demands_client_certificates
    )
