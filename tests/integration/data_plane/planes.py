"""The data planes under test behind one face: an engine here, peers elsewhere, and ways to hurt a peer.

A peer is a process of its own that shares its registered memory with the test through a file, so the test reads what
really landed; it does as it is told line by line. A memory peer is an engine of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cache_runtime.shared_memory import SharedMemory
from cache_runtime.transfer.engine import NO_KEY, Permit, PlaneKind, Region, Spans, TransferEngine
from cache_runtime.transfer.memory_engine import MemoryEngine, MemoryFabric
from cache_runtime.transfer.mooncake_engine import MooncakeEngine
from cache_runtime.transfer.shm_engine import open_shm_engine
from cache_runtime.transfer.stream_engine import open_stream_engine
from cache_runtime.transfer.stream_tls import TlsFiles

PROBE_BYTES = 64
# The product's 5 s would only make the tests about stopped peers longer.
PROGRESS_TIMEOUT_S = 2.0
PR_SET_PDEATHSIG = 1


class Memory:
    """Mapped bytes with a stable address; `array` is a view of them. Shareable, unless they are a file of the test."""

    def __init__(self, num_bytes: int, file: Path | None = None) -> None:
        self.descriptor: int | None = None
        if file is None:
            self._shared = SharedMemory(num_bytes, "pdmesh-test")
            self._map = self._shared.mapping
            self.descriptor = self._shared.descriptor
        else:
            with file.open("r+b") as opened:
                self._map = mmap.mmap(opened.fileno(), num_bytes)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.region = Region(base_address=int(self.array.ctypes.data), num_bytes=num_bytes)

    def fill_with_noise(self, seed: int) -> None:
        self.array[:] = np.random.default_rng(seed).integers(1, 256, self.array.size, dtype=np.uint8)

    def register_with(self, engine: TransferEngine) -> None:
        engine.register(self.region.base_address, self.region.num_bytes, shared_descriptor=self.descriptor)


def spans_of(*regions: Region) -> Spans:
    return np.array([(region.base_address, region.end_address) for region in regions], dtype=np.int64)


class Peer(ABC):
    """The receiving end. `memory` shows what landed in `region`, `probe` what landed in `probe_region`.

    It allows everything to writes that name no key.
    """

    endpoint: str
    memory: Memory
    probe: Memory
    region: Region
    probe_region: Region

    @abstractmethod
    def allow(self, key: bytes, *regions: Region) -> None: ...

    @abstractmethod
    def revoke(self, key: bytes) -> None:
        """Returns once the peer's own call has."""

    @abstractmethod
    def num_refused_runs(self) -> int: ...

    @abstractmethod
    def freeze(self) -> None:
        """It answers nobody any more, and nothing lands."""

    @abstractmethod
    def kill(self) -> None:
        """It is gone."""


class Plane(ABC):
    name: str
    kind: PlaneKind
    # Whether a peer can be started at the endpoint of one that is gone.
    can_restart = False

    @abstractmethod
    def make_engine(self) -> TransferEngine: ...

    @abstractmethod
    def start_peer(self, num_bytes: int, endpoint: str = "") -> Peer: ...

    @abstractmethod
    def unused_endpoint(self) -> str: ...


class MemoryPlane(Plane):
    name = "memory"

    def __init__(self, kind: PlaneKind) -> None:
        self.kind = kind
        self.fabric = MemoryFabric()

    def make_engine(self) -> TransferEngine:
        return MemoryEngine(self.fabric, kind=self.kind)

    def start_peer(self, num_bytes: int, endpoint: str = "") -> Peer:
        assert not endpoint
        return MemoryPeer(self.fabric, self.kind, num_bytes)

    def unused_endpoint(self) -> str:
        return "memory:987654"


class MemoryPeer(Peer):
    def __init__(self, fabric: MemoryFabric, kind: PlaneKind, num_bytes: int) -> None:
        self._fabric = fabric
        self._engine = MemoryEngine(fabric, kind=kind)
        self._permits: dict[bytes, Permit] = {}
        self.memory, self.probe = Memory(num_bytes), Memory(PROBE_BYTES)
        self.region, self.probe_region = self.memory.region, self.probe.region
        for memory in (self.memory, self.probe):
            memory.register_with(self._engine)
        self.allow(NO_KEY, self.region, self.probe_region)
        self.endpoint = self._engine.endpoint

    def allow(self, key: bytes, *regions: Region) -> None:
        self._permits[key] = self._engine.allow(key, spans_of(*regions))

    def revoke(self, key: bytes) -> None:
        self._permits.pop(key).revoke()

    def num_refused_runs(self) -> int:
        return self._engine.num_refused_runs

    def freeze(self) -> None:
        self._fabric.hold(self.endpoint)

    def kill(self) -> None:
        self._engine.close()


class ProcessPlane(Plane):
    """A plane whose peers are processes."""

    def __init__(self, folder: Path, *, tls: TlsFiles | None = None) -> None:
        self._folder = folder
        self._tls = tls
        self._num_peers = 0

    def start_peer(self, num_bytes: int, endpoint: str = "") -> ProcessPeer:
        self._num_peers += 1
        return ProcessPeer(self, self._folder / f"peer{self._num_peers}", num_bytes, endpoint)

    @abstractmethod
    def peer_options(self) -> dict[str, str]:
        """What a peer's process must know to open its engine."""


class MooncakePlane(ProcessPlane):
    name = "mooncake"
    kind = PlaneKind.ONE_SIDED

    def make_engine(self) -> TransferEngine:
        return MooncakeEngine("127.0.0.1")

    def peer_options(self) -> dict[str, str]:
        return {}

    def unused_endpoint(self) -> str:
        # Below every ephemeral range and the library's own, and reserved: nothing listens there.
        return "127.0.0.1:1"


class ShmPlane(ProcessPlane):
    name = "shm"
    kind = PlaneKind.TWO_SIDED
    can_restart = True

    def make_engine(self) -> TransferEngine:
        return open_shm_engine(progress_timeout_s=PROGRESS_TIMEOUT_S)

    def peer_options(self) -> dict[str, str]:
        return {}

    def unused_endpoint(self) -> str:
        return "pdmesh-nobody"


class StreamPlane(ProcessPlane):
    name = "stream"
    kind = PlaneKind.TWO_SIDED
    can_restart = True

    def make_engine(self) -> TransferEngine:
        return open_stream_engine(
            "127.0.0.1", bind_host="127.0.0.1", tls=self._tls, progress_timeout_s=PROGRESS_TIMEOUT_S
        )

    def peer_options(self) -> dict[str, str]:
        if self._tls is None:
            return {}
        return {name: str(getattr(self._tls, name)) for name in ("certificate", "key", "authority")}

    def unused_endpoint(self) -> str:
        return "127.0.0.1:1"


class ProcessPeer(Peer):
    def __init__(self, plane: ProcessPlane, file: Path, num_bytes: int, endpoint: str) -> None:
        with file.open("wb") as opened:
            opened.truncate(num_bytes + mmap.PAGESIZE)
        shared = Memory(num_bytes + mmap.PAGESIZE, file)
        options = {"plane": plane.name, "endpoint": endpoint, **plane.peer_options()}
        self._log = file.with_suffix(".log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(file), str(num_bytes), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Shown only when it ends unasked: tests kill peers in mid-write, and the libraries log that.
                stderr=log,
                text=True,
            )
        hello = self._hear()
        self.endpoint = hello["endpoint"]
        self.memory, self.probe = shared, Memory(PROBE_BYTES)
        self.memory.array, self.probe.array = shared.array[:num_bytes], shared.array[num_bytes:][:PROBE_BYTES]
        base_address = hello["base_address"]
        self.region = Region(base_address=base_address, num_bytes=num_bytes)
        self.probe_region = Region(base_address=base_address + num_bytes, num_bytes=PROBE_BYTES)
        self.allow(NO_KEY, self.region, self.probe_region)

    def allow(self, key: bytes, *regions: Region) -> None:
        self._tell("allow", key.hex(), spans_of(*regions).tolist())

    def revoke(self, key: bytes) -> None:
        self._tell("revoke", key.hex())

    def num_refused_runs(self) -> int:
        return self._tell("count")

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        # The signal is on its way; what it is sent until all its threads stand still may yet be taken.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _tell(self, *words):
        """Has the peer do something; returns what it answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self._hear()

    def _hear(self):
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait()}: {self._log.read_text(errors='replace')[-2000:]}"
        return json.loads(line)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _open_engine(options: dict[str, str]) -> TransferEngine:
    endpoint = options["endpoint"]
    match options["plane"]:
        case "mooncake":
            return MooncakeEngine("127.0.0.1")
        case "shm":
            return open_shm_engine(endpoint=endpoint)
        case _:
            tls = None
            if "key" in options:
                tls = TlsFiles(**{name: Path(options[name]) for name in ("certificate", "key", "authority")})
            port = int(endpoint.rpartition(":")[2]) if endpoint else 0
            return open_stream_engine("127.0.0.1", bind_host="127.0.0.1", port=port, tls=tls)


def _serve(file: Path, num_bytes: int, options: dict[str, str]) -> None:
    """Body of the peer process: exposes the file's bytes until it is killed or its parent closes the pipe."""
    memory = Memory(num_bytes + mmap.PAGESIZE, file)
    base_address = memory.region.base_address
    engine = _open_engine(options)
    engine.register(base_address, num_bytes)
    engine.register(base_address + num_bytes, PROBE_BYTES)
    permits: dict[str, Permit] = {}
    _say({"endpoint": engine.endpoint, "base_address": base_address})
    for line in sys.stdin:
        answer: object = None
        match json.loads(line):
            case ["allow", key, spans]:
                permits[key] = engine.allow(bytes.fromhex(key), np.array(spans, dtype=np.int64))
            case ["revoke", key]:
                permits.pop(key).revoke()
            case ["count"]:
                answer = engine.num_refused_runs
        _say(answer)


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    # Here and not between fork and exec, where the code of libraries that watch forks would run.
    _die_with_parent()
    _serve(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
