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

import numpy as np

from cache_runtime.shared_memory import SharedMemory
from cache_runtime.transfer.engine import KEY_BYTES, Spans

NONCE_BYTES = 32


def nonce_key(nonce: bytes) -> bytes:
    """Under which the nonce is written, where the receiver checks keys."""
    return nonce[:KEY_BYTES]


class ProbeSlot:
    """`NONCE_BYTES` bytes at a fixed address."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    @property
    def spans(self) -> Spans:
        """Where it lies, as a data plane is told."""
        return np.array([[self.address, self.address + NONCE_BYTES]], dtype=np.int64)

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
        # Shared, or shared memory could not be proved: its receiver reads the nonce from here.
        self._memory = SharedMemory(num_slots * NONCE_BYTES, "pdmesh-probes")
        self._num_free = asyncio.Semaphore(num_slots)
        # Slots that were given back, and the address of the first one that nobody has had yet.
        self._free: list[ProbeSlot] = []
        self._next_address = self.base_address

    @property
    def base_address(self) -> int:
        return self._memory.base_address

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    @property
    def shared_descriptor(self) -> int:
        """Of the file that holds the buffer."""
        return self._memory.descriptor

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[ProbeSlot]:
        """A zeroed slot of one's own; waits for one to come free."""
        async with self._num_free:
            slot = self._free.pop() if self._free else self._make_slot()
            try:
                slot.fill(bytes(NONCE_BYTES))
                yield slot
            finally:
                self._free.append(slot)

    def _make_slot(self) -> ProbeSlot:
        slot = ProbeSlot(self._next_address)
        self._next_address += NONCE_BYTES
        return slot
