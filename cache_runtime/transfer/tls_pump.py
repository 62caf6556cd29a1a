"""Lets code that works on a plain socket talk through TLS: a thread moves the bytes between a socket pair and the
encrypted connection.

One copy more than encryption itself needs, and the native loops stay free of any TLS library.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading

_BUFFER_BYTES = 1 << 18


def pumped(secure: ssl.SSLSocket) -> socket.socket:
    """A plain socket in front of `secure`, which it takes over. Closing or shutting down the one ends the other."""
    near, far = socket.socketpair()
    pump = _Pump(secure, far)
    threading.Thread(target=pump.run, name="pdmesh-tls", daemon=True).start()
    return near


class _Direction:
    """Bytes on their way from one socket to the other."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self._source = source
        self._target = target
        self._buffer = bytearray(_BUFFER_BYTES)
        self._pending = memoryview(b"")
        self._is_at_end = False

    @property
    def wants_to_send(self) -> bool:
        return len(self._pending) > 0

    @property
    def wants_to_receive(self) -> bool:
        return not self._pending and not self._is_at_end

    @property
    def is_over(self) -> bool:
        return not self._pending and self._is_at_end

    def move(self) -> bool:
        """One step without waiting; whether anything moved. Raises OSError when the target takes nothing any more."""
        if self.wants_to_receive:
            self._receive()
        num_bytes = len(self._pending)
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            if num_bytes:
                self._pending = self._pending[self._target.send(self._pending) :]
        return len(self._pending) < num_bytes

    def _receive(self) -> None:
        # As much as there is: TLS hands out one record at a time, and each send wakes the other side.
        room = memoryview(self._buffer)
        num_bytes = 0
        try:
            while num_bytes < len(room) and not self._is_at_end:
                num_received = self._source.recv_into(room[num_bytes:])
                num_bytes += num_received
                self._is_at_end = num_received == 0
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            pass
        except OSError:
            # However a connection ends, nothing more comes.
            self._is_at_end = True
        self._pending = room[:num_bytes]


class _Pump:
    def __init__(self, secure: ssl.SSLSocket, far: socket.socket) -> None:
        self._secure = secure
        self._far = far
        self._outward = _Direction(far, secure)
        self._inward = _Direction(secure, far)

    def run(self) -> None:
        """Moves bytes until one side ends: it does so only when it has nothing more to send or to hear."""
        for end in (self._secure, self._far):
            end.setblocking(False)
        try:
            while not self._outward.is_over and not self._inward.is_over:
                moved_outward, moved_inward = self._outward.move(), self._inward.move()
                if not moved_outward and not moved_inward:
                    self._wait()
        except OSError:
            # The other side of a socket is gone; so is then what was meant for it.
            return
        finally:
            self._far.close()
            with contextlib.suppress(OSError):
                self._secure.shutdown(socket.SHUT_RDWR)
            self._secure.close()

    def _wait(self) -> None:
        waiting = select.poll()
        waiting.register(self._far, _events(self._outward.wants_to_receive, self._inward.wants_to_send))
        waiting.register(self._secure, _events(self._inward.wants_to_receive, self._outward.wants_to_send))
        if any(events & (select.POLLHUP | select.POLLERR) for _, events in waiting.poll()):
            raise BrokenPipeError


def _events(wants_to_read: bool, wants_to_write: bool) -> int:
    return (select.POLLIN if wants_to_read else 0) | (select.POLLOUT if wants_to_write else 0)
