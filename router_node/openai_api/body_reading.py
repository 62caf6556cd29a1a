"""Reads the bodies of requests: within a size, at a speed, and within what all of them may take together.

Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import ClientDisconnect, Request

from node_runtime.errors import QueueFull, RequestCancelled
from router_node.openai_api.failures import BadBody

_JSON: Final = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)
_JSON_TYPE: Final = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """A body is complete `base_s` after its headers, and a second later for every `min_bytes_per_s` that it has."""

    max_bytes: int
    max_bytes_of_all: int
    base_s: float = 10.0
    min_bytes_per_s: int = 16 * 1024

    def __post_init__(self) -> None:
        if self.max_bytes_of_all < self.max_bytes:
            raise ValueError(
                f"max_bytes_of_all: at least max_bytes ({self.max_bytes}) required, got {self.max_bytes_of_all}"
            )


@dataclass(slots=True)
class BodyReader:
    """All bodies of a server."""

    limits: BodyLimits
    _num_held_bytes: int = field(default=0, init=False)

    async def read(self, request: Request) -> bytes:
        """Raises, before all of it was read, BadBody for one that is too long, too slow or of another type, QueueFull
        when others take all there is, and RequestCancelled when the client leaves.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip()
        if not _JSON.fullmatch(content_type):
            raise BadBody(f'content-type: "{content_type}" given, {_JSON_TYPE} required', http_status=415)
        limits, loop = self.limits, asyncio.get_running_loop()
        began_s = loop.time()
        content = bytearray()
        patience = asyncio.timeout(limits.base_s)
        try:
            with self._holding() as held:
                async with patience:
                    async for piece in request.stream():
                        if len(content) + len(piece) > limits.max_bytes:
                            message = f"body: more than {limits.max_bytes} bytes given, at most that allowed"
                            raise BadBody(message, http_status=413)
                        held.take(len(piece))
                        content += piece
                        patience.reschedule(began_s + limits.base_s + len(content) / limits.min_bytes_per_s)
        except ClientDisconnect:
            raise RequestCancelled("the client left before it had sent its request") from None
        except TimeoutError:
            if not patience.expired():
                raise
            message = f"body: {len(content)} bytes in {loop.time() - began_s:.0f} s given, {limits.base_s:g} s and one "
            raise BadBody(f"{message}for every {limits.min_bytes_per_s} bytes allowed", http_status=408) from None
        return bytes(content)

    @contextmanager
    def _holding(self) -> Iterator[_Held]:
        held = _Held(self)
        try:
            yield held
        finally:
            self._num_held_bytes -= held.num_bytes

    def _take(self, num_bytes: int) -> None:
        allowed = self.limits.max_bytes_of_all
        if self._num_held_bytes + num_bytes > allowed:
            raise QueueFull(f"body: the requests that are being received take {allowed} bytes, the most they may")
        self._num_held_bytes += num_bytes


@dataclass(slots=True)
class _Held:
    """What one body takes of what there is for all."""

    reader: BodyReader
    num_bytes: int = 0

    def take(self, num_bytes: int) -> None:
        """Raises QueueFull."""
        self.reader._take(num_bytes)
        self.num_bytes += num_bytes
