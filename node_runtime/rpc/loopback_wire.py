"""What a loopback transport sends, and the wire that it sends it over."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import grpc

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
Serializer: TypeAlias = Callable[[object], bytes]
Deserializer: TypeAlias = Callable[[bytes], object]


class OpenCall(NamedTuple):
    """First frame of a call; `data` is the request of a method that takes one."""

    call_id: int
    method: str
    metadata: Metadata
    timeout_s: float | None
    data: bytes | None


class Data(NamedTuple):
    """One message, either way."""

    call_id: int
    data: bytes


class CancelCall(NamedTuple):
    """The client gave the call up."""

    call_id: int


class EndCall(NamedTuple):
    """Last frame of a call, from the server."""

    call_id: int
    code: grpc.StatusCode
    details: str
    metadata: Metadata


Frame: TypeAlias = OpenCall | Data | CancelCall | EndCall


class Connection(Protocol):
    """One end of an ordered connection."""

    def send(self, frame: Frame) -> None:
        """Never blocks; without effect on a broken connection."""
        ...

    def close(self) -> None:
        """Ends it; the peer hears `on_broken`, this end does not."""
        ...


class Receiver(Protocol):
    """What listens at one end of a connection."""

    def on_frame(self, frame: Frame) -> None: ...

    def on_broken(self, reason: str) -> None:
        """Nothing is sent or received any more."""
        ...


class Wire(Protocol):
    """How one process reaches others and is reached."""

    def dial(self, address: str, receiver: Receiver, on_end: Callable[[Connection | str], None]) -> None:
        """Calls `on_end` later with the connection, or with why there is none."""
        ...

    def listen(self, address: str, accept: Callable[[Connection], Receiver]) -> None:
        """Raises RuntimeError when somebody listens there already."""
        ...

    def close_listener(self, address: str) -> None: ...
