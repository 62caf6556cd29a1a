"""What a handler may know about the call it serves."""

from __future__ import annotations

from typing import Protocol

from node_runtime.rpc.access import Caller


class RpcContext(Protocol):
    """The `context` argument of every handler. Statuses are set by raising, never through this."""

    def time_remaining_s(self) -> float:
        """Seconds until the call's deadline, the server's default one included; never negative."""
        ...

    def peer(self) -> str:
        """Transport address of the caller, for logs only."""
        ...

    def caller(self) -> Caller:
        """Who calls, as the access policy of the server knows it."""
        ...
