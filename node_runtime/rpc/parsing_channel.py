"""What generated stubs are made on, so that a response that cannot be read is seen as one.

gRPC's own channel logs a traceback for it and hands None to whoever reads the stream. Knows no calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import grpc
from google.protobuf.message import DecodeError

ResponseT = TypeVar("ResponseT")
Parse = Callable[[bytes], ResponseT]


class Unreadable:
    """Stands for a response that is no message of its type."""

    __slots__ = ()


UNREADABLE: Final = Unreadable()


class ParsingChannel:
    """A channel as stubs want it. Their calls give UNREADABLE for a response that cannot be read."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary_unary(self, *args: object, response_deserializer: Parse[ResponseT], **kwargs: object) -> object:
        return _made(self._channel.unary_unary, args, response_deserializer, kwargs)

    def unary_stream(self, *args: object, response_deserializer: Parse[ResponseT], **kwargs: object) -> object:
        return _made(self._channel.unary_stream, args, response_deserializer, kwargs)

    def stream_unary(self, *args: object, response_deserializer: Parse[ResponseT], **kwargs: object) -> object:
        return _made(self._channel.stream_unary, args, response_deserializer, kwargs)

    def stream_stream(self, *args: object, response_deserializer: Parse[ResponseT], **kwargs: object) -> object:
        return _made(self._channel.stream_stream, args, response_deserializer, kwargs)


def _made(
    make: Callable[..., object], args: tuple[object, ...], parse: Parse[ResponseT], kwargs: dict[str, object]
) -> object:
    """The callable of a method. Stubs name its other arguments as they like, and more of them with each release."""

    def read(data: bytes) -> ResponseT | Unreadable:
        try:
            return parse(data)
        except DecodeError:
            return UNREADABLE

    return make(*args, response_deserializer=read, **kwargs)
