"""The receiver-fenced planes against peers that break every rule: the connection ends, the engine and others go on."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
from integration.data_plane.planes import Memory, spans_of
from support.processes import wait_until

from cache_runtime.shared_memory import SharedMemory
from cache_runtime.transfer.engine import (
    DataPlaneUnavailable,
    Region,
    Run,
    TransferEngine,
    TransferFailed,
    TransferRejected,
)
from cache_runtime.transfer.greeting import MAX_REGIONS, SharedRegion, greet
from cache_runtime.transfer.shm_engine import ShmTransport, open_shm_engine
from cache_runtime.transfer.stream_engine import open_stream_engine

PATIENCE_S = 30.0
BATCH = struct.Struct("<IIQ16s")
PIECE = struct.Struct("<QQQ")
COMPLETION = struct.Struct("<IIQII")
BATCH_MAGIC = 0x62646D70
COMPLETION_MAGIC = 0x63646D70
KEY = bytes(range(16))
NUM_BYTES = 1 << 20


@pytest.fixture(params=["shm", "stream"])
def receiver(request: pytest.FixtureRequest) -> Iterator[TransferEngine]:
    engine = open_shm_engine() if request.param == "shm" else open_stream_engine("127.0.0.1", bind_host="127.0.0.1")
    yield engine
    engine.close()


@pytest.fixture
def target(receiver: TransferEngine) -> Memory:
    """Memory of the receiver's, granted under KEY."""
    memory = Memory(NUM_BYTES)
    memory.register_with(receiver)
    receiver.allow(KEY, spans_of(memory.region))
    return memory


def connect(engine: TransferEngine) -> socket.socket:
    if engine.name == "shm":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(f"\0{engine.endpoint}")
    else:
        host, _, port = engine.endpoint.rpartition(":")
        connection = socket.create_connection((host, int(port)))
    connection.settimeout(PATIENCE_S)
    return connection


class Stranger:
    """A writer that keeps to the rules only as far as the test wants."""

    def __init__(self, engine: TransferEngine) -> None:
        self.is_shared = engine.name == "shm"
        self.source = Memory(NUM_BYTES)
        self.source.fill_with_noise(5)
        self.connection = connect(engine)
        descriptor = self.source.descriptor
        assert descriptor is not None
        shared = [SharedRegion(region=self.source.region, descriptor=descriptor)] if self.is_shared else []
        self.exposed = greet(self.connection, shared, time.monotonic() + PATIENCE_S)
        self.connection.settimeout(PATIENCE_S)

    def frame(self, *pieces: tuple[int, int, int], batch: int = 0, key: bytes = KEY) -> bytes:
        head = BATCH.pack(BATCH_MAGIC, len(pieces), batch, key)
        return head + b"".join(PIECE.pack(*piece) for piece in pieces)

    def piece(self, target: Memory, offset: int, num_bytes: int) -> tuple[int, int, int]:
        return self.source.region.base_address, target.region.base_address + offset, num_bytes

    def payload(self, num_bytes: int) -> bytes:
        """What follows a frame where memory is not shared."""
        return b"" if self.is_shared else self.source.array[:num_bytes].tobytes()

    def hear(self) -> bytes:
        """The next completion, or nothing when the receiver hung up."""
        received = b""
        with suppress(ConnectionResetError):
            while len(received) < COMPLETION.size and (piece := self.connection.recv(COMPLETION.size - len(received))):
                received += piece
        return received


def assert_still_serves(receiver: TransferEngine, target: Memory) -> None:
    target.array[:] = 0
    stranger = Stranger(receiver)
    stranger.connection.sendall(stranger.frame(stranger.piece(target, 0, 4096)) + stranger.payload(4096))
    assert COMPLETION.unpack(stranger.hear()) == (COMPLETION_MAGIC, 0, 0, 0, 1)
    assert np.array_equal(target.array[:4096], stranger.source.array[:4096])


def test_a_stranger_that_keeps_to_the_rules_is_served(receiver: TransferEngine, target: Memory) -> None:
    assert_still_serves(receiver, target)


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"pdmeshDP" + struct.pack("<HHI", 99, 0, 0),
        b"pdmeshDP" + struct.pack("<HHI", 1, 0, MAX_REGIONS + 1),
        b"pdmeshDP" + struct.pack("<HHI", 1, 0, 0xFFFFFFFF),
        b"pdmeshDP" + struct.pack("<HHI", 1, 0, 1) + struct.pack("<QQ", 0, 5),
        b"pdmeshDP" + struct.pack("<HHI", 1, 0, 1) + struct.pack("<QQ", 4096, 1 << 63),
        b"pdmeshDP" + struct.pack("<HHI", 1, 0, 2) + struct.pack("<QQQQ", 4096, 64, 4100, 64),
        # A region without a descriptor, and regions where none are shared.
        b"pdmeshDP" + struct.pack("<HHI", 1, 0, 1) + struct.pack("<QQ", 4096, 64),
        bytes(range(100, 116)),
    ],
)
def test_a_malformed_greeting_ends_the_connection(receiver: TransferEngine, target: Memory, greeting: bytes) -> None:
    connection = connect(receiver)
    connection.sendall(greeting)
    with suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    assert_still_serves(receiver, target)


def test_a_silent_connection_is_not_waited_for(receiver: TransferEngine, target: Memory) -> None:
    connection = connect(receiver)
    with suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    assert_still_serves(receiver, target)


MALFORMED = {
    "no magic": lambda stranger, target: b"\0" * BATCH.size,
    "no pieces": lambda stranger, target: BATCH.pack(BATCH_MAGIC, 0, 0, KEY),
    "too many pieces": lambda stranger, target: BATCH.pack(BATCH_MAGIC, 1025, 0, KEY),
    "a count that wraps": lambda stranger, target: BATCH.pack(BATCH_MAGIC, 0xFFFFFFFF, 0, KEY),
    "a batch out of turn": lambda stranger, target: stranger.frame(stranger.piece(target, 0, 1), batch=7),
    "an empty piece": lambda stranger, target: stranger.frame(stranger.piece(target, 0, 0)),
    "a piece that is too long": lambda stranger, target: stranger.frame(stranger.piece(target, 0, (8 << 20) + 1)),
    "a length that wraps": lambda stranger, target: stranger.frame(stranger.piece(target, 0, (1 << 64) - 1)),
    "a target that wraps": lambda stranger, target: stranger.frame((4096, (1 << 64) - 1, 2)),
    "no target": lambda stranger, target: stranger.frame((4096, 0, 2)),
    "a source that wraps": lambda stranger, target: stranger.frame(
        ((1 << 64) - 1, target.region.base_address, 2), batch=0
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_batch_ends_the_connection_and_moves_nothing(
    receiver: TransferEngine, target: Memory, name: str
) -> None:
    stranger = Stranger(receiver)
    stranger.connection.sendall(MALFORMED[name](stranger, target))
    assert stranger.hear() == b""
    assert not target.array.any()
    assert_still_serves(receiver, target)


def test_a_peer_that_goes_away_inside_a_frame_leaves_the_rest_alone(receiver: TransferEngine, target: Memory) -> None:
    stranger = Stranger(receiver)
    whole = stranger.frame(stranger.piece(target, 0, 4096), stranger.piece(target, 8192, 4096))
    stranger.connection.sendall(whole[:-5])
    stranger.connection.close()
    assert_still_serves(receiver, target)
    assert not target.array[8192:].any()


def test_targets_outside_of_the_grant_are_refused_piece_by_piece(receiver: TransferEngine, target: Memory) -> None:
    stranger = Stranger(receiver)
    pieces = [
        stranger.piece(target, 0, 4096),
        stranger.piece(target, -1, 2),
        stranger.piece(target, NUM_BYTES - 1, 2),
        (stranger.source.region.base_address, stranger.source.region.base_address + 4096, 64),
        (stranger.source.region.base_address, 1, 64),
        stranger.piece(target, 8192, 4096),
    ]
    payload = b"".join(stranger.payload(num_bytes) for _, _, num_bytes in pieces)
    stranger.connection.sendall(stranger.frame(*pieces) + payload)
    assert COMPLETION.unpack(stranger.hear()) == (COMPLETION_MAGIC, 4, 0, 1, 6)
    expected = np.zeros(NUM_BYTES, dtype=np.uint8)
    for offset in (0, 8192):
        expected[offset : offset + 4096] = stranger.source.array[:4096]
    assert np.array_equal(target.array, expected)
    assert receiver.num_refused_runs == 4


def test_a_revocation_waits_for_no_peer_and_the_rest_of_a_run_is_thrown_away() -> None:
    receiver = open_stream_engine("127.0.0.1", bind_host="127.0.0.1")
    memory = Memory(NUM_BYTES)
    memory.register_with(receiver)
    permit = receiver.allow(KEY, spans_of(memory.region))
    stranger = Stranger(receiver)
    size = 65536
    stranger.connection.sendall(
        stranger.frame(stranger.piece(memory, 0, size), stranger.piece(memory, size, size))
        + stranger.payload(size)[: size // 2]
    )
    # Half of a run is in place, and its writer says nothing more.
    wait_until(lambda: memory.array[: size // 2].all(), PATIENCE_S, "the first half has landed")
    permit.revoke()
    memory.array[:] = 0
    stranger.connection.sendall(stranger.payload(size)[size // 2 :] + stranger.payload(size))
    assert COMPLETION.unpack(stranger.hear()) == (COMPLETION_MAGIC, 2, 0, 0, 2)
    assert not memory.array.any()
    # The connection is in step: what comes next under a live grant lands.
    receiver.allow(KEY, spans_of(memory.region))
    stranger.connection.sendall(stranger.frame(stranger.piece(memory, 0, 64), batch=1) + stranger.payload(64))
    assert COMPLETION.unpack(stranger.hear()) == (COMPLETION_MAGIC, 0, 1, 0, 1)
    assert memory.array[:64].all()
    receiver.close()


# What only shared memory can get wrong.


@pytest.fixture
def shm_receiver() -> Iterator[TransferEngine]:
    engine = open_shm_engine()
    yield engine
    engine.close()


def unsealed() -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, NUM_BYTES)
    return descriptor


def too_small() -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, NUM_BYTES - 1)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def plain_file() -> int:
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    os.ftruncate(descriptor, NUM_BYTES)
    return descriptor


@pytest.mark.parametrize("make", [unsealed, too_small, plain_file, lambda: os.pipe()[0]])
def test_memory_that_could_vanish_under_the_reader_is_not_mapped(
    shm_receiver: TransferEngine, make: Callable[[], int]
) -> None:
    connection, descriptor = connect(shm_receiver), make()
    region = Region(base_address=4096, num_bytes=NUM_BYTES)
    with pytest.raises((ValueError, ConnectionResetError)):
        greet(connection, [SharedRegion(region=region, descriptor=descriptor)], time.monotonic() + PATIENCE_S)
    os.close(descriptor)


def test_a_source_outside_of_the_shared_memory_ends_the_connection(shm_receiver: TransferEngine) -> None:
    target = Memory(NUM_BYTES)
    target.register_with(shm_receiver)
    shm_receiver.allow(KEY, spans_of(target.region))
    stranger = Stranger(shm_receiver)
    base, end = stranger.source.region.base_address, stranger.source.region.end_address
    for source, num_bytes in ((base - 1, 2), (end - 1, 2), (end, 1), (1, 64), (target.region.base_address, 64)):
        stranger.connection.sendall(stranger.frame((source, target.region.base_address, num_bytes)))
        assert stranger.hear() == b""
        stranger = Stranger(shm_receiver)
        base, end = stranger.source.region.base_address, stranger.source.region.end_address
    assert not target.array.any()


def test_memory_that_is_not_shared_cannot_be_sent(shm_receiver: TransferEngine) -> None:
    target, private = Memory(NUM_BYTES), np.ones(4096, dtype=np.uint8)
    target.register_with(shm_receiver)
    shm_receiver.allow(KEY, spans_of(target.region))
    writer = open_shm_engine()
    address = int(private.ctypes.data)
    writer.register(address, 4096)
    link = writer.open_peer(shm_receiver.endpoint, [target.region])
    with pytest.raises(TransferRejected, match="source"):
        link.write([Run(address, target.region.base_address, 4096)], key=KEY, timeout_s=9).result(PATIENCE_S)
    writer.close()


def test_no_descriptor_is_left_behind_by_connections_that_came_and_went(shm_receiver: TransferEngine) -> None:
    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    source = SharedMemory(4096, "test")
    before = num_descriptors()
    for _ in range(20):
        connection = connect(shm_receiver)
        region = Region(base_address=source.base_address, num_bytes=4096)
        with suppress(ValueError, ConnectionResetError):
            greet(
                connection,
                [SharedRegion(region=region, descriptor=source.descriptor)],
                time.monotonic() + PATIENCE_S,
            )
        connection.close()
    wait_until(lambda: num_descriptors() <= before, PATIENCE_S, "all descriptors are closed")


def test_two_engines_cannot_listen_at_one_endpoint(shm_receiver: TransferEngine) -> None:
    with pytest.raises(DataPlaneUnavailable, match=shm_receiver.endpoint):
        ShmTransport(shm_receiver.endpoint)
    stream = open_stream_engine("127.0.0.1", bind_host="127.0.0.1")
    with pytest.raises(DataPlaneUnavailable, match="cannot listen"):
        open_stream_engine("127.0.0.1", bind_host="127.0.0.1", port=int(stream.endpoint.rpartition(":")[2]))
    stream.close()


# Receivers that answer nonsense.


def answer(connection: socket.socket, completion: bytes, exposed: Region) -> None:
    connection.recv(16)
    connection.sendall(
        b"pdmeshDP" + struct.pack("<HHI", 1, 0, 1) + struct.pack("<QQ", exposed.base_address, exposed.num_bytes)
    )
    connection.recv(BATCH.size)
    connection.sendall(completion)
    with suppress(OSError):
        while connection.recv(1 << 16):
            pass


@pytest.mark.parametrize(
    "completion",
    [
        b"\0" * COMPLETION.size,
        COMPLETION.pack(COMPLETION_MAGIC, 0, 1, 0, 1),
        COMPLETION.pack(COMPLETION_MAGIC, 2, 0, 0, 1),
        COMPLETION.pack(COMPLETION_MAGIC, 1, 0, 9, 1),
        COMPLETION.pack(COMPLETION_MAGIC, 0, 0, 0, 2),
        COMPLETION.pack(COMPLETION_MAGIC, 0, 0, 0, 1) * 2,
    ],
)
def test_a_malformed_completion_fails_the_link_and_is_never_taken_for_success(completion: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    exposed = Region(base_address=1 << 40, num_bytes=1 << 20)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            answer(connection, completion, exposed)

    threading.Thread(target=serve, daemon=True).start()
    writer, source = open_stream_engine("127.0.0.1", bind_host="127.0.0.1"), Memory(1 << 20)
    source.register_with(writer)
    link = writer.open_peer(endpoint, [exposed])
    run = Run(source.region.base_address, exposed.base_address, 1 << 20)
    # The second completion of the last case finds nothing to settle: it must break the link, not another write.
    first = link.write([run], timeout_s=9).exception(PATIENCE_S)
    if completion[COMPLETION.size :]:
        wait_until(lambda: link.write([run], timeout_s=9).exception(PATIENCE_S), PATIENCE_S, "the link has failed")
    else:
        assert isinstance(first, TransferFailed)
        assert "malformed" in first.reason
    writer.close()
    listener.close()


def test_leaving_with_open_links_ends_the_process_in_good_order() -> None:
    script = (
        "import sys\n"
        "from cache_runtime.transfer.shm_engine import open_shm_engine\n"
        "from cache_runtime.transfer.engine import Region\n"
        "receiver, writer = open_shm_engine(), open_shm_engine()\n"
        "import numpy as np\n"
        "memory = np.zeros(4096, dtype=np.uint8)\n"
        "receiver.register(int(memory.ctypes.data), 4096)\n"
        "link = writer.open_peer(receiver.endpoint, [Region(base_address=int(memory.ctypes.data), num_bytes=4096)])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
