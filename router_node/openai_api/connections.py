"""Bounds of HTTP connections: how many there are, and how long one may keep the server waiting.

uvicorn's protocol, which bounds the size of a head and the time between requests, with what it leaves open: heads that
come slowly or never, answers that nobody reads, bodies that go on behind their answer. Knows no path and no request.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from router_node.openai_api.failures import HttpFailure

_log = logging.getLogger("pdmesh.http")

_RETRY_AFTER_S: Final = 1.0
# Of what waits in this process for one client. Beyond it nothing more is made for that client.
_MAX_UNSENT_BYTES: Final = 1
# A client that takes less than this in one period does not read.
_MIN_TAKEN_BYTES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """`head_s`: from the connection, or the first byte of a further request, to the end of its headers; likewise for a
    handshake of TLS. `idle_s`: between requests. `unread_s`: within which a client must read something that waits for
    it. `linger_s`: how long a body may go on whose request is answered.
    """

    max_connections: int = 4096
    head_s: float = 10.0
    idle_s: int = 75
    unread_s: float = 30.0
    linger_s: float = 5.0

    def __post_init__(self) -> None:
        values = {
            "max_connections": self.max_connections,
            "head_s": self.head_s,
            "idle_s": self.idle_s,
            "unread_s": self.unread_s,
            "linger_s": self.linger_s,
        }
        for name, value in values.items():
            if value <= 0:
                raise ValueError(f"{name}: must be above 0, got {value}")


class BoundedProtocol(H11Protocol):
    """One connection. Made by `bounded_by`."""

    limits: ClassVar[ConnectionLimits]
    _late_head: asyncio.TimerHandle | None = None
    _late_body: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _num_unsent_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_MAX_UNSENT_BYTES, low=0)
        if len(self.connections) > self.limits.max_connections:
            _log.warning("a connection is refused: %d are open", self.limits.max_connections)
            message = f"more than {self.limits.max_connections} connections are open"
            self._part(HttpFailure(status=503, message=message, kind="server_error", retry_after_s=_RETRY_AFTER_S))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late_head, self._late_body, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        state = self.conn.their_state
        if state is h11.IDLE:
            self._await_head()
        elif self._late_head is not None:
            self._late_head.cancel()
            self._late_head = None
        if state is not h11.SEND_BODY and self._late_body is not None:
            self._late_body.cancel()
            self._late_body = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and self._late_body is None:
            self._late_body = self.loop.call_later(self.limits.linger_s, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _await_head(self) -> None:
        """From the first byte on, however many follow."""
        if self._late_head is None:
            self._late_head = self.loop.call_later(self.limits.head_s, self._give_up_head)

    def _give_up_head(self) -> None:
        self._late_head = None
        if self.transport.is_closing():
            return
        begun, _ = self.conn.trailing_data
        if not begun:
            # Nobody asked, so nobody is answered.
            self.transport.close()
            return
        message = f"headers: not complete within {self.limits.head_s:g} s"
        self._part(HttpFailure(status=408, message=message, kind="invalid_request_error"))

    def _part(self, failure: HttpFailure) -> None:
        """Says why, and hangs up."""
        content = failure.encoded()
        fields = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
            **failure.headers(),
        }
        lines = [f"HTTP/1.1 {failure.status} ", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        self.transport.write("\r\n".join(lines).encode() + content)
        self.transport.close()

    def _watch_reader(self) -> None:
        """Looks again later whether the client has read any of what waits for it."""
        self._num_unsent_bytes = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self.limits.unread_s, self._judge_reader)

    def _judge_reader(self) -> None:
        if self._num_unsent_bytes - self.transport.get_write_buffer_size() >= _MIN_TAKEN_BYTES:
            self._watch_reader()
            return
        _log.info("a connection is cut: its client has read nothing for %g s", self.limits.unread_s)
        self._unread = None
        self.transport.abort()


def bounded_by(connection_limits: ConnectionLimits) -> type[BoundedProtocol]:
    """The protocol with these limits."""

    class Protocol(BoundedProtocol):
        limits = connection_limits

    return Protocol
