"""TLS of the stream data plane: who may connect, to whom, and certificates that are read again when they are replaced.

Knows sockets and files, no data plane. Rotation concerns new connections; those that are open go on.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from .engine import DataPlaneUnavailable

_LOG = logging.getLogger(__name__)

_Stamp = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: this node's certificate chain and key, and the authority that signs those of the mesh.

    `receiver_name`: the DNS name that whoever is dialled must have, None: the host that was dialled. `writer_name`: the
    DNS name that whoever dials must have, None: any that the authority has signed.
    """

    certificate: Path
    key: Path
    authority: Path
    receiver_name: str | None = None
    writer_name: str | None = None

    def stamp(self) -> _Stamp:
        """Changes when a file is replaced. Raises OSError."""
        found = [path.stat() for path in (self.certificate, self.key, self.authority)]
        return tuple((status.st_mtime_ns, status.st_ino) for status in found)


@dataclass(frozen=True, slots=True)
class _Contexts:
    """Made from the files as they were at one moment."""

    stamp: _Stamp
    listening: ssl.SSLContext
    dialling: ssl.SSLContext


class StreamTls:
    """Encrypts connections under `files`. Thread-safe."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises DataPlaneUnavailable when the files cannot be used."""
        self._files = files
        self._lock = threading.Lock()
        try:
            self._contexts = self._read()
        except (OSError, ssl.SSLError) as error:
            paths = ", ".join(str(path) for path in (files.certificate, files.key, files.authority))
            raise DataPlaneUnavailable(f"stream: the TLS files {paths} cannot be used: {error}") from None

    def accept(self, accepted: socket.socket) -> ssl.SSLSocket:
        """Takes over a connection that was accepted. Raises OSError, and ValueError for a writer without its name."""
        secure = self._current().listening.wrap_socket(accepted, server_side=True)
        name = self._files.writer_name
        if name is not None and name not in _dns_names(secure):
            secure.close()
            raise ValueError(f"whoever writes must show a certificate of {name}")
        return secure

    def dial(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """Takes over a connection that was made to `host`. Raises OSError."""
        name = self._files.receiver_name or host
        return self._current().dialling.wrap_socket(connection, server_hostname=name)

    def _current(self) -> _Contexts:
        with self._lock:
            try:
                if self._files.stamp() != self._contexts.stamp:
                    self._contexts = self._read()
                    _LOG.info("certificates of the stream data plane were read again")
            except (OSError, ssl.SSLError) as error:
                _LOG.warning("certificates are being replaced or cannot be read, the old ones stay: %s", error)
            return self._contexts

    def _read(self) -> _Contexts:
        stamp = self._files.stamp()
        return _Contexts(stamp, self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT))

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._files.certificate, self._files.key)
        context.load_verify_locations(self._files.authority)
        return context


def _dns_names(connection: ssl.SSLSocket) -> frozenset[str]:
    """Of the certificate that the other side has shown."""
    shown = connection.getpeercert() or {}
    alternatives = shown.get("subjectAltName", ())
    names: set[str] = set()
    for entry in alternatives if isinstance(alternatives, tuple) else ():
        match entry:
            case ("DNS", str(name)):
                names.add(name)
    return frozenset(names)
