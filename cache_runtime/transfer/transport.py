"""What the receiver-fenced planes differ in: how a connection is made, and whether memory is shared."""

from __future__ import annotations

import socket
from typing import Protocol


class Transport(Protocol):
    """Connections of one plane. Thread-safe."""

    @property
    def name(self) -> str:
        """Name of the plane."""
        ...

    @property
    def protocol(self) -> str:
        """What its connections speak."""
        ...

    @property
    def endpoint(self) -> str:
        """Where peers connect to this process."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether the receiver takes the bytes from memory of the writer's, or from the connection."""
        ...

    @property
    def listener(self) -> socket.socket:
        """Accepts connections."""
        ...

    def secure(self, accepted: socket.socket, deadline_s: float) -> socket.socket:
        """Makes sure that an accepted connection may be served, and returns what to serve it on.

        Takes the connection over. Raises OSError, TimeoutError, ValueError.
        """
        ...

    def connect(self, endpoint: str, deadline_s: float) -> socket.socket:
        """A connection to a peer. Raises OSError, TimeoutError, ValueError."""
        ...
