"""The data plane over TCP: bytes go from memory to memory through one socket per peer, scattered and gathered.

With TLS files every connection is encrypted and both ends show a certificate that the given authority signed
(`stream_tls`). Without, what is written is protected by its grant key alone, which travels in the open: keep it inside
a trusted network.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from .engine import DataPlaneUnavailable
from .socket_engine import PROGRESS_TIMEOUT_S, SocketEngine
from .stream_tls import StreamTls, TlsFiles
from .timed_socket import parse_host_port, remaining_s
from .tls_pump import pumped

_BACKLOG = 128
# Finds out about a host that is gone while nothing is being written, in 30 s.
_KEEPALIVE_IDLE_S = 15
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 3


class StreamTransport:
    """TCP, with TLS on request."""

    name = "stream"
    is_shared = False

    def __init__(self, host: str, *, bind_host: str = "", port: int = 0, tls: TlsFiles | None = None) -> None:
        """
        Args:
            host: Address peers reach this node at; part of the endpoint.
            bind_host: Address to listen on; empty: all interfaces.
            port: 0 takes a free one.

        Raises DataPlaneUnavailable.
        """
        self.protocol = "tcp" if tls is None else "tls"
        self._tls = None if tls is None else StreamTls(tls)
        try:
            self.listener = _listen(bind_host, port)
        except OSError as error:
            where = f"{bind_host or '*'}:{port}"
            raise DataPlaneUnavailable(f"stream: cannot listen at {where}: {error.strerror or error}") from None
        shown = f"[{host}]" if ":" in host else host
        self.endpoint = f"{shown}:{self.listener.getsockname()[1]}"

    def secure(self, accepted: socket.socket, deadline_s: float) -> socket.socket:
        _tune(accepted)
        if self._tls is None:
            return accepted
        accepted.settimeout(remaining_s(deadline_s))
        return pumped(self._tls.accept(accepted))

    def connect(self, endpoint: str, deadline_s: float) -> socket.socket:
        host, port = parse_host_port(endpoint)
        connection = socket.create_connection((host, port), remaining_s(deadline_s))
        try:
            _tune(connection)
            if self._tls is None:
                return connection
            connection.settimeout(remaining_s(deadline_s))
            return pumped(self._tls.dial(connection, host))
        except BaseException:
            connection.close()
            raise


def open_stream_engine(
    host: str,
    *,
    bind_host: str = "",
    port: int = 0,
    tls: TlsFiles | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress_timeout_s: float = PROGRESS_TIMEOUT_S,
) -> SocketEngine:
    """Starts receiving; see `StreamTransport`. Raises DataPlaneUnavailable."""
    transport = StreamTransport(host, bind_host=bind_host, port=port, tls=tls)
    return SocketEngine(transport, clock=clock, progress_timeout_s=progress_timeout_s)


def _listen(bind_host: str, port: int) -> socket.socket:
    if bind_host in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
    return socket.create_server((bind_host, port), family=family, backlog=_BACKLOG)


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
