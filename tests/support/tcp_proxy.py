"""A TCP proxy that can break what passes through it: resets, stalls and silence, as a bad network makes them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from types import TracebackType

_CHUNK_BYTES = 1 << 16
_TICK_S = 0.02
_SEND_TIMEOUT_S = 5.0


class TcpProxy:
    """Forwards connections to `target` from a thread of its own. Start it as a context manager."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._forwards = threading.Event()
        self._forwards.set()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"proxy to {target}", daemon=True)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closing.set()
        self._thread.join()
        self.reset()
        self._listener.close()

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._pairs) // 2

    def reset(self) -> None:
        """Every connection ends in a TCP reset on both sides; new ones are let through."""
        with self._lock:
            for end in self._pairs:
                # Linger of zero seconds: close sends RST instead of FIN.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()
            self._pairs.clear()

    def go_silent(self) -> None:
        """Nothing passes any more, and nobody is told: connections stay, new ones are accepted and never answered."""
        self._forwards.clear()

    def forward(self) -> None:
        """Passes everything again, what was held back first."""
        self._forwards.set()

    def _run(self) -> None:
        while not self._is_closing.is_set():
            if not self._forwards.wait(_TICK_S):
                continue
            with self._lock:
                ends = [self._listener, *self._pairs]
            with selectors.DefaultSelector() as selector:
                for end in ends:
                    # Closed by a reset since the list was made.
                    with contextlib.suppress(ValueError, OSError):
                        selector.register(end, selectors.EVENT_READ)
                for key, _ in selector.select(_TICK_S):
                    self._pass(key.fileobj)

    def _pass(self, end: object) -> None:
        assert isinstance(end, socket.socket)
        if end is self._listener:
            self._accept()
            return
        with self._lock:
            other = self._pairs.get(end)
            if other is None:
                return
            try:
                data = end.recv(_CHUNK_BYTES)
                if data:
                    other.sendall(data)
            except OSError:
                data = b""
            if not data:
                for closing in (end, other):
                    self._pairs.pop(closing, None)
                    closing.close()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=2.0)
        except OSError:
            near.close()
            return
        for end in (near, far):
            # A receiver that is stopped must not stop the proxy for ever.
            end.settimeout(_SEND_TIMEOUT_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._pairs[near], self._pairs[far] = far, near
