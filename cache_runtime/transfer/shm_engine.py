"""The data plane between processes of one host: the receiver copies out of the writer's memory, which it has mapped.

Peers meet on a Unix socket in the abstract namespace, so what can connect shares the host and its network namespace;
only processes of the same user are served. Descriptors, lists of runs and completions go over it, never cache bytes.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from .engine import DataPlaneUnavailable
from .socket_engine import PROGRESS_TIMEOUT_S, SocketEngine
from .timed_socket import remaining_s

_CREDENTIALS = struct.Struct("3i")  # process, user, group. Source: unix(7), SO_PEERCRED
_BACKLOG = 128
_BUFFER_BYTES = 1 << 20


def host_id() -> str:
    """Names this host for as long as it runs; empty where the system does not say. Source: proc(5), boot_id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class ShmTransport:
    """Unix sockets in the abstract namespace."""

    name = "shm"
    protocol = "unix"
    is_shared = True

    def __init__(self, endpoint: str = "") -> None:
        """`endpoint`: a name of one's own; empty draws one that nobody can guess. Raises DataPlaneUnavailable."""
        self.endpoint = endpoint or f"pdmesh-{secrets.token_hex(16)}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.listener.bind(f"\0{self.endpoint}")
            self.listener.listen(_BACKLOG)
        except OSError as error:
            self.listener.close()
            raise DataPlaneUnavailable(f"shm: cannot listen at {self.endpoint}: {error.strerror}") from None

    def secure(self, accepted: socket.socket, deadline_s: float) -> socket.socket:
        del deadline_s  # the kernel knows at once
        _check_user(accepted)
        return accepted

    def connect(self, endpoint: str, deadline_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(remaining_s(deadline_s))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            connection.connect(f"\0{endpoint}")
            # Before it is handed our memory.
            _check_user(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def open_shm_engine(
    *,
    endpoint: str = "",
    clock: Callable[[], float] = time.monotonic,
    progress_timeout_s: float = PROGRESS_TIMEOUT_S,
) -> SocketEngine:
    """Starts receiving. Raises DataPlaneUnavailable."""
    return SocketEngine(ShmTransport(endpoint), clock=clock, progress_timeout_s=progress_timeout_s)


def _check_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise ValueError(f"the process at the other end belongs to user {user}, this one to user {os.geteuid()}")
