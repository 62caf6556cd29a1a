"""The data planes under test behind one face: an engine here, peers elsewhere, and ways to hurt a peer.

A Mooncake peer is a process of its own that shares its registered memory with the test through a file, so the test
reads what really landed. A memory peer is an engine of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cache_runtime.transfer.engine import Region, TransferEngine
from cache_runtime.transfer.memory_engine import MemoryEngine, MemoryFabric
from cache_runtime.transfer.mooncake_engine import MooncakeEngine

PROBE_BYTES = 64
PR_SET_PDEATHSIG = 1


class Memory:
    """Mapped bytes with a stable address; `array` is a view of them."""

    def __init__(self, num_bytes: int, file: Path | None = None) -> None:
        if file is None:
            self._map = mmap.mmap(-1, num_bytes)
        else:
            with file.open("r+b") as opened:
                self._map = mmap.mmap(opened.fileno(), num_bytes)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.region = Region(base_address=int(self.array.ctypes.data), num_bytes=num_bytes)

    def fill_with_noise(self, seed: int) -> None:
        self.array[:] = np.random.default_rng(seed).integers(1, 256, self.array.size, dtype=np.uint8)


class Peer(ABC):
    """The receiving end. `memory` shows what landed in `region`, `probe` what landed in `probe_region`."""

    endpoint: str
    memory: Memory
    probe: Memory
    region: Region
    probe_region: Region

    @abstractmethod
    def freeze(self) -> None:
        """It answers nobody any more, and nothing lands."""

    @abstractmethod
    def kill(self) -> None:
        """It is gone."""


class Plane(ABC):
    name: str

    @abstractmethod
    def make_engine(self) -> TransferEngine: ...

    @abstractmethod
    def start_peer(self, num_bytes: int) -> Peer: ...

    @abstractmethod
    def unused_endpoint(self) -> str: ...


class MemoryPlane(Plane):
    name = "memory"

    def __init__(self) -> None:
        self.fabric = MemoryFabric()

    def make_engine(self) -> TransferEngine:
        return MemoryEngine(self.fabric)

    def start_peer(self, num_bytes: int) -> Peer:
        return MemoryPeer(self.fabric, num_bytes)

    def unused_endpoint(self) -> str:
        return "memory:987654"


class MemoryPeer(Peer):
    def __init__(self, fabric: MemoryFabric, num_bytes: int) -> None:
        self._fabric = fabric
        self._engine = MemoryEngine(fabric)
        self.memory, self.probe = Memory(num_bytes), Memory(PROBE_BYTES)
        self.region, self.probe_region = self.memory.region, self.probe.region
        for region in (self.region, self.probe_region):
            self._engine.register(region.base_address, region.num_bytes)
        self.endpoint = self._engine.endpoint

    def freeze(self) -> None:
        self._fabric.hold(self.endpoint)

    def kill(self) -> None:
        self._engine.close()


class MooncakePlane(Plane):
    name = "mooncake"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_peers = 0

    def make_engine(self) -> TransferEngine:
        return MooncakeEngine("127.0.0.1")

    def start_peer(self, num_bytes: int) -> Peer:
        self._num_peers += 1
        return MooncakePeer(self._folder / f"peer{self._num_peers}", num_bytes)

    def unused_endpoint(self) -> str:
        # Below every ephemeral range and the library's own, and reserved: nothing listens there.
        return "127.0.0.1:1"


class MooncakePeer(Peer):
    def __init__(self, file: Path, num_bytes: int) -> None:
        with file.open("wb") as opened:
            opened.truncate(num_bytes + mmap.PAGESIZE)
        shared = Memory(num_bytes + mmap.PAGESIZE, file)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(file), str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Tests kill peers in mid-write; what the library logs about that says nothing new.
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=_die_with_parent,
        )
        assert self.process.stdout is not None
        hello = json.loads(self.process.stdout.readline())
        self.endpoint = hello["endpoint"]
        self.memory, self.probe = shared, Memory(PROBE_BYTES)
        self.memory.array, self.probe.array = shared.array[:num_bytes], shared.array[num_bytes:][:PROBE_BYTES]
        base_address = hello["base_address"]
        self.region = Region(base_address=base_address, num_bytes=num_bytes)
        self.probe_region = Region(base_address=base_address + num_bytes, num_bytes=PROBE_BYTES)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(file: Path, num_bytes: int) -> None:
    """Body of the peer process: exposes the file's bytes until it is killed or its parent closes the pipe."""
    memory = Memory(num_bytes + mmap.PAGESIZE, file)
    base_address = memory.region.base_address
    engine = MooncakeEngine("127.0.0.1")
    engine.register(base_address, num_bytes)
    engine.register(base_address + num_bytes, PROBE_BYTES)
    print(json.dumps({"endpoint": engine.endpoint, "base_address": base_address}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
