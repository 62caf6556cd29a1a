"""HTTPS with the certificate of the router, which is read again when it is replaced.

The files are looked at when a handshake begins, as gRPC's listener does; what cannot be read then leaves the old
certificate in place.
"""

from __future__ import annotations

import logging
import ssl

from node_runtime.errors import BadConfig
from node_runtime.rpc import TlsFiles

_log = logging.getLogger("pdmesh.http")


class HttpsContexts:
    """The context of the listener, and of the connections that come once the files have changed."""

    def __init__(self, files: TlsFiles, *, demands_client_certificate: bool) -> None:
        """Raises BadConfig when a file cannot be read or holds no certificate."""
        self._files = files
        self._demands_client_certificate = demands_client_certificate
        try:
            self._stamp = files.stamp()
            self._current = self._make()
        except (OSError, ValueError) as error:
            raise BadConfig(f"tls: {error}") from None
        self.listening = self._current
        self.listening.sni_callback = self._choose

    def _make(self) -> ssl.SSLContext:
        """Raises OSError (of which errors of TLS are a kind) or ValueError."""
        if self._files.certificate is None:
            raise ValueError("no certificate is configured")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._files.certificate, self._files.key)
        if self._demands_client_certificate:
            context.load_verify_locations(self._files.authority)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _choose(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """For the handshake that begins, whatever name the client dials."""
        try:
            stamp = self._files.stamp()
            if stamp != self._stamp:
                self._current = self._make()
                self._stamp = stamp
                _log.info("certificates were read again")
        except (OSError, ValueError) as error:
            _log.warning("certificates are being replaced or cannot be read, the old ones stay: %s", error)
        connection.context = self._current
