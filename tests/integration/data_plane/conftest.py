from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration.data_plane.planes import Memory, MemoryPlane, MooncakePlane, Peer, Plane, ShmPlane, StreamPlane
from support.certificates import make_tls_files

from cache_runtime.transfer.engine import PlaneKind, TransferEngine

MEMORY_BYTES = 80 << 20

# Read by the native library on first use; the product's 5 s would only make the tests about stopped peers longer.
os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "2")
os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", "2")


def make_plane(name: str, folder: Path) -> Plane:
    match name:
        case "memory":
            return MemoryPlane(PlaneKind.ONE_SIDED)
        case "fenced memory":
            return MemoryPlane(PlaneKind.TWO_SIDED)
        case "mooncake":
            return MooncakePlane(folder)
        case "shm":
            return ShmPlane(folder)
        case "stream":
            return StreamPlane(folder)
        case _:
            return StreamPlane(folder, tls=make_tls_files(folder))


PLANES = ("memory", "fenced memory", "mooncake", "shm", "stream", "stream with TLS")


@pytest.fixture(scope="session", params=PLANES)
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plane:
    return make_plane(request.param, tmp_path_factory.mktemp("peers"))


@pytest.fixture(scope="session")
def source() -> Memory:
    """Local memory full of noise without zero bytes, so that every landed byte is visible."""
    memory = Memory(MEMORY_BYTES)
    memory.fill_with_noise(7)
    return memory


@pytest.fixture
def make_engine(plane: Plane, source: Memory) -> Iterator[Callable[[], TransferEngine]]:
    engines: list[TransferEngine] = []

    def make() -> TransferEngine:
        engine = plane.make_engine()
        source.register_with(engine)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: Callable[[], TransferEngine]) -> TransferEngine:
    return make_engine()


@pytest.fixture(scope="session")
def shared_peer(plane: Plane) -> Iterator[Peer]:
    peer = plane.start_peer(MEMORY_BYTES)
    yield peer
    peer.kill()


@pytest.fixture
def peer(shared_peer: Peer) -> Peer:
    """A healthy peer with zeroed memory; tests that hurt it use `doomed_peer`."""
    shared_peer.memory.array[:] = 0
    shared_peer.probe.array[:] = 0
    return shared_peer


@pytest.fixture
def doomed_peer(plane: Plane) -> Iterator[Peer]:
    peer = plane.start_peer(16 << 20)
    yield peer
    peer.kill()
