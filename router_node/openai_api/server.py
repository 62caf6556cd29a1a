"""Listens for HTTP and hands requests to an ASGI application, on the event loop that is running.

uvicorn's protocol without its main loop: signals, life cycle and the end of running calls are the node's business, and
an idle router does not wake ten times a second.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from typing import Final
from wsgiref.handlers import format_date_time

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from node_runtime.errors import BadConfig, PortInUse
from node_runtime.rpc import format_address
from router_node.openai_api.connections import BoundedProtocol, ConnectionLimits, bounded_by
from router_node.openai_api.failures import HttpFailure

# Request line and headers together.
MAX_HEADER_BYTES: Final = 16 * 1024
_BACKLOG: Final = 1024
# Calls are over when a server is stopped; this is for what is still on its way to a client.
_FAREWELL_S: Final = 1


class HttpServer:
    """Serves from `start` to `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        advertise_host: str = "",
        tls: ssl.SSLContext | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """Port 0 takes a free one. `advertise_host`: where clients reach this machine, if not at `host`. With `tls` it
        speaks HTTPS.
        """
        self._limits = limits or ConnectionLimits()
        self._tls = tls
        self._host = host
        self._port = port
        self._advertise_host = advertise_host
        self._state = ServerState()
        self._protocol = bounded_by(self._limits)
        self._config = uvicorn.Config(
            _Front(app),
            http=self._protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=self._limits.idle_s,
        )
        self._listener: asyncio.Server | None = None

    @property
    def advertised_address(self) -> str:
        """host:port; meaningful after `start`."""
        host = self._advertise_host or (socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host)
        return format_address(host, self._port)

    async def start(self) -> None:
        """Raises PortInUse, or BadConfig when the host is not an address of this machine."""
        listening = _bound_socket(self._host, self._port)
        self._port = listening.getsockname()[1]
        self._config.load()
        self._listener = await asyncio.get_running_loop().create_server(
            self._make_protocol,
            sock=listening,
            backlog=_BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self._limits.head_s,
        )

    def _make_protocol(self) -> BoundedProtocol:
        return self._protocol(config=self._config, server_state=self._state, app_state={})

    async def stop(self) -> None:
        """Closes the listener and every connection. Idempotent, and copes with a start that failed."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listener.close()
        for connection in tuple(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            _, late = await asyncio.wait(self._state.tasks, timeout=_FAREWELL_S)
            for task in late:
                task.cancel()


class _Front:
    """What uvicorn leaves to its main loop, and to luck: the date of every response, and a bound on the headers of a
    request that came in one piece.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_dated(message: Message) -> None:
            if message["type"] == "http.response.start":
                date = format_date_time(time.time()).encode()
                message = {**message, "headers": [*message.get("headers", ()), (b"date", date)]}
            await send(message)

        app = self._app if _header_bytes(scope) <= MAX_HEADER_BYTES else _TOO_LONG
        await app(scope, receive, send_dated)


def _header_bytes(scope: Scope) -> int:
    line = len(scope["path"]) + len(scope["query_string"])
    return line + sum(len(name) + len(value) for name, value in scope["headers"])


def _refusal_of_long_headers() -> JSONResponse:
    message = f"headers: more than {MAX_HEADER_BYTES} bytes given, at most that allowed"
    failure = HttpFailure(status=431, message=message, kind="invalid_request_error")
    return JSONResponse(failure.body(), status_code=failure.status)


_TOO_LONG: Final = _refusal_of_long_headers()


def _bound_socket(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(host, port) from None
        raise BadConfig(f"http: cannot listen on {format_address(host, port)}: {error.strerror or error}") from None
