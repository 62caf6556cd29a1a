"""Socket calls that end by a deadline, whatever the other side does."""

from __future__ import annotations

import socket
import time


def remaining_s(deadline_s: float) -> float:
    """Seconds until the monotonic `deadline_s`. Raises TimeoutError when it has passed."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def receive_exactly(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Raises TimeoutError, OSError, and ValueError when the other side hangs up."""
    received = bytearray()
    while len(received) < num_bytes:
        # Anew for every piece, or a peer that drips bytes could stretch the limit for ever.
        connection.settimeout(remaining_s(deadline_s))
        piece = connection.recv(num_bytes - len(received))
        if not piece:
            raise ValueError(f"connection closed after {len(received)} of {num_bytes} bytes")
        received += piece
    return bytes(received)


def parse_host_port(endpoint: str) -> tuple[str, int]:
    """Raises ValueError."""
    host, separator, port = endpoint.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError("the endpoint is not host:port")
    return host.strip("[]"), int(port)
