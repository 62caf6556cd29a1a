"""The device seam: arena memory, pinned staging, uploads, streams and events.

The only place that knows which kind of device it is on. On the CPU work runs in program order, so streams and events
have nothing to do; the CUDA twin maps the same calls onto torch.cuda.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cache_runtime.errors import ArenaAllocationError, UnknownDeviceError
from cache_runtime.shared_memory import SharedMemory

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "uint8": torch.uint8}
)
"""The torch dtype of every dtype name a cache field may have."""


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """True once all work recorded before the event has finished."""

    def synchronize(self) -> None:
        """Block the caller until `is_done`."""


class Stream(Protocol):
    """An ordered queue of device work."""

    def activate(self) -> AbstractContextManager[object]:
        """Work issued inside the context goes to this stream."""

    def record_event(self) -> Event:
        """Mark the work issued to this stream so far."""

    def wait_event(self, event: Event) -> None:
        """Later work of this stream starts only after `event`; the caller does not block."""


class Device(Protocol):
    """What the cache runtime needs of a device."""

    @property
    def torch_device(self) -> torch.device: ...

    def as_default(self) -> AbstractContextManager[object]:
        """Tensors that are made inside the context, and name no device, lie on this one."""

    def available_bytes(self) -> int:
        """Bytes that `alloc` could hand out now."""

    def alloc(self, num_bytes: int, alignment_bytes: int) -> torch.Tensor:
        """uint8[num_bytes], zeroed, its address a multiple of `alignment_bytes`. Raises ArenaAllocationError."""

    def shared_descriptor(self, base_address: int) -> int | None:
        """Of the file that holds the memory which `alloc` returned at this address; None when no process can map it."""

    def alloc_pinned(self, num_bytes: int) -> torch.Tensor:
        """uint8[num_bytes] on the host, fit for asynchronous copies."""

    def upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """`array` on the device in the order of the current stream. May alias `array`: treat both as read-only."""

    def current_stream(self) -> Stream: ...

    def new_stream(self) -> Stream: ...

    def synchronize(self) -> None:
        """Block until all streams are idle."""


class CpuEvent:
    """Program order has already run everything before it."""

    def is_done(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuStream:
    """Work runs when issued, so ordering holds by itself."""

    def activate(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record_event(self) -> Event:
        return CpuEvent()

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class CpuDevice:
    """Host memory. Arena memory is mapped, not touched: the kernel commits a page when it is first written."""

    def __init__(self, *, is_shared: bool = False) -> None:
        """`is_shared`: other processes may map the arena once they are handed its descriptor."""
        self._is_shared = is_shared
        # For the life of the process, as the memory that data planes are told of is.
        self._shared: dict[int, SharedMemory] = {}

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def as_default(self) -> AbstractContextManager[object]:
        # It is the default already; torch's own context would slow every call inside down.
        return nullcontext()

    def available_bytes(self) -> int:
        return min(_system_available_bytes(), _control_group_available_bytes())

    def alloc(self, num_bytes: int, alignment_bytes: int) -> torch.Tensor:
        if alignment_bytes > mmap.PAGESIZE:
            raise ArenaAllocationError(
                f"arena alignment of {alignment_bytes} bytes exceeds the memory page of {mmap.PAGESIZE} bytes"
            )
        available_bytes = self.available_bytes()
        if num_bytes > available_bytes:
            raise ArenaAllocationError(
                f"arena of {num_bytes} bytes does not fit: {available_bytes} bytes of memory are available"
            )
        try:
            mapping = self._map(num_bytes)
        except OSError as error:
            raise ArenaAllocationError(f"arena of {num_bytes} bytes could not be mapped: {error}") from error
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def shared_descriptor(self, base_address: int) -> int | None:
        memory = self._shared.get(base_address)
        return None if memory is None else memory.descriptor

    def _map(self, num_bytes: int) -> mmap.mmap:
        if not self._is_shared:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = SharedMemory(num_bytes, "pdmesh-arena")
            self._shared[memory.base_address] = memory
            mapping = memory.mapping
        # A layer's rows lie in short pieces all over the arena, each on another small page. A system may refuse.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def alloc_pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array)

    def current_stream(self) -> Stream:
        return CpuStream()

    def new_stream(self) -> Stream:
        return CpuStream()

    def synchronize(self) -> None:
        return None


class CudaEvent:
    """Wraps one torch.cuda event, already recorded."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.native = event

    def is_done(self) -> bool:
        return bool(self.native.query())

    def synchronize(self) -> None:
        self.native.synchronize()


class CudaStream:
    """Wraps one torch.cuda stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._native = stream

    def activate(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._native)

    def record_event(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._native)
        return CudaEvent(event)

    def wait_event(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            self._native.wait_event(event.native)
        else:
            event.synchronize()


class CudaDevice:
    """One CUDA device by index. Raises UnknownDeviceError where torch has none of that index."""

    def __init__(self, index: int) -> None:
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= num_devices:
            reason = "is built without CUDA" if torch.version.cuda is None else f"finds {num_devices} CUDA devices"
            raise UnknownDeviceError(f'device "cuda:{index}" is not there: torch {torch.__version__} {reason}')
        self._device = torch.device("cuda", index)

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def as_default(self) -> AbstractContextManager[object]:
        return self._device

    def available_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return free_bytes

    def alloc(self, num_bytes: int, alignment_bytes: int) -> torch.Tensor:
        try:
            raw = torch.zeros(num_bytes + alignment_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise ArenaAllocationError(
                f"arena of {num_bytes} bytes does not fit: {self.available_bytes()} bytes are free on {self._device}"
            ) from error
        begin = -raw.data_ptr() % alignment_bytes
        return raw[begin : begin + num_bytes]

    def shared_descriptor(self, base_address: int) -> int | None:
        del base_address  # device memory lies in no file
        return None

    def alloc_pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        # The caching host allocator keeps this fresh staging buffer until the copy has run.
        return torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)

    def current_stream(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def new_stream(self) -> Stream:
        return CudaStream(torch.cuda.Stream(self._device))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def open_device(name: str, *, is_shared: bool = False) -> Device:
    """The device called `cpu`, `cuda` (the first) or `cuda:INDEX`. Raises UnknownDeviceError.

    With `is_shared` other processes may map an arena in host memory; device memory is never shared.
    """
    match name.split(":"):
        case ["cpu"]:
            return CpuDevice(is_shared=is_shared)
        case ["cuda"]:
            return CudaDevice(0)
        case ["cuda", index] if index.isdecimal():
            return CudaDevice(int(index))
        case _:
            raise UnknownDeviceError(f'device "{name}" is unknown (known: cpu, cuda, cuda:INDEX)')


def _system_available_bytes() -> int:
    """Free and reclaimable memory; all of it where the system does not say. Source: proc(5), MemAvailable, in KiB."""
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_group_available_bytes() -> int:
    """What the container's memory limit leaves; file cache counts as free.

    Source: cgroup v2, memory.max, memory.current, and inactive_file and active_file of memory.stat.
    """
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return _system_available_bytes()
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    file_cache_bytes = int(stat["inactive_file"]) + int(stat["active_file"])
    used_bytes = int((group / "memory.current").read_text()) - file_cache_bytes
    return max(0, int(limit.read_text()) - used_bytes)
