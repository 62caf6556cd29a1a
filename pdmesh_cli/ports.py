"""Free TCP ports for children, known before the children run.

A port stays bound here, without listening, until its child serves: nobody else is given it, and the child can listen
on it, because both sockets allow the address to be reused. Whoever reserves closes.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from node_runtime.errors import PortInUse


@contextmanager
def reserved_ports(host: str, count: int) -> Iterator[tuple[int, ...]]:
    """Different free ports of `host`. Raises OSError."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind((host, 0))
        yield tuple(each.getsockname()[1] for each in sockets)


class PortTaken(PortInUse):
    """Said before anything is started. `option` is the one that chooses another port."""

    def __init__(self, host: str, port: int, option: str) -> None:
        super().__init__(host, port)
        self.option = option


def check_port_free(host: str, port: int, *, option: str) -> None:
    """Raises PortTaken when somebody listens there. Whatever else is wrong with the address is left to who listens."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(host, port, option) from None
