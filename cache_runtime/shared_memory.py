"""Memory that another process of this host can map once it was handed the descriptor: a file without a name.

The file is sealed at its size, so that no holder of the descriptor can shrink it under a process that reads it. Knows
no device and no data plane; the memory lives as long as the object.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import numpy as np

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """`num_bytes` zeroed bytes; the kernel commits them when they are first written. Raises OSError."""

    def __init__(self, num_bytes: int, name: str) -> None:
        """`name` shows up in this process's list of mappings."""
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, num_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.mapping = mmap.mmap(self._descriptor, num_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.num_bytes = num_bytes
        self.base_address = int(np.frombuffer(self.mapping, dtype=np.uint8).ctypes.data)

    @property
    def descriptor(self) -> int:
        """Of the file; stays open as long as this object lives."""
        return self._descriptor

    def __del__(self) -> None:
        # Absent when the constructor failed.
        descriptor = self.__dict__.get("_descriptor")
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class MappedMemory:
    """Another process's `SharedMemory`. The descriptor stays the caller's and may be closed at once."""

    def __init__(self, descriptor: int, num_bytes: int, *, is_writable: bool = False) -> None:
        """Raises ValueError when the file may shrink or is too small, OSError when it cannot be mapped."""
        check_shareable(descriptor, num_bytes)
        access = mmap.PROT_READ | mmap.PROT_WRITE if is_writable else mmap.PROT_READ
        self._mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=access)
        self.num_bytes = num_bytes
        self.base_address = int(np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data)


def check_shareable(descriptor: int, num_bytes: int) -> None:
    """Raises ValueError unless the descriptor is a file of at least `num_bytes` that can never become smaller."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError(f"the descriptor is no shared memory: {error.strerror}") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("the shared memory is not sealed against shrinking")
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes < num_bytes:
        raise ValueError(f"the shared memory has {found_bytes} bytes, {num_bytes} were announced")
