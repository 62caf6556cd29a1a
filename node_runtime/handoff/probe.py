"""Memory outside the arena through which the data plane is proved at bootstrap.

The prefill node writes a nonce from a slot of its buffer into a slot of the decode node's, which reads it back from its
own memory. One slot per concurrent bootstrap. The node registers the buffer with its data plane; the buffer lives as
long as the process.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

NONCE_BYTES = 32


class ProbeSlot:
    """`NONCE_BYTES` bytes at a fixed address."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def fill(self, content: bytes) -> None:
        """Raises ValueError when `content` is not exactly one slot long."""
        if len(content) != NONCE_BYTES:
            raise ValueError(f"nonce: {len(content)} bytes given, {NONCE_BYTES} required")
        ctypes.memmove(self.address, content, NONCE_BYTES)

    def read(self) -> bytes:
        return ctypes.string_at(self.address, NONCE_BYTES)


class ProbeBuffer:
    """A pool of probe slots. Its methods belong to one event loop; the data plane writes from anywhere."""

    def __init__(self, num_slots: int = 64) -> None:
        self._memory = ctypes.create_string_buffer(num_slots * NONCE_BYTES)
        self._free: asyncio.Queue[ProbeSlot] = asyncio.Queue()
        for index in range(num_slots):
            self._free.put_nowait(ProbeSlot(self.base_address + index * NONCE_BYTES))

    @property
    def base_address(self) -> int:
        return ctypes.addressof(self._memory)

    @property
    def num_bytes(self) -> int:
        return len(self._memory)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[ProbeSlot]:
        """A zeroed slot of one's own; waits for one to come free."""
        slot = await self._free.get()
        try:
            slot.fill(bytes(NONCE_BYTES))
            yield slot
        finally:
            self._free.put_nowait(slot)
