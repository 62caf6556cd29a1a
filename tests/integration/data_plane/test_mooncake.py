"""What only the Mooncake plane does: refusals before it starts, and its behaviour as a guest in the process."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from integration.data_plane.planes import Memory, MooncakePlane, ProcessPeer

from cache_runtime.transfer import create_engine
from cache_runtime.transfer.engine import (
    DataPlaneUnavailable,
    MissingDataPlane,
    PeerUnreachable,
    Region,
    Run,
    TransferFailed,
)
from cache_runtime.transfer.mooncake_engine import MooncakeEngine, check_request


@pytest.fixture
def mooncake(tmp_path: Path) -> MooncakePlane:
    return MooncakePlane(tmp_path)


@pytest.fixture
def mooncake_peer(mooncake: MooncakePlane) -> Iterator[ProcessPeer]:
    peer = mooncake.start_peer(1 << 20)
    assert isinstance(peer, ProcessPeer)
    yield peer
    peer.kill()


def test_a_log_folder_is_refused_because_the_library_would_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_LOG_DIR", "/tmp")
    with pytest.raises(DataPlaneUnavailable, match="MC_LOG_DIR"):
        MooncakeEngine("127.0.0.1")


def test_the_protocol_without_acknowledgements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(DataPlaneUnavailable, match="MC_TCP_PROTO=1"):
        MooncakeEngine("127.0.0.1")


def test_a_progress_timeout_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "soon")
    with pytest.raises(DataPlaneUnavailable, match="MC_TCP_PROGRESS_TIMEOUT_SEC=soon"):
        MooncakeEngine("127.0.0.1")


def test_the_drain_bound_follows_the_native_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "11")
    assert MooncakeEngine("127.0.0.1").drain_bound_s > 11


def test_rdma_without_a_device_is_refused_and_names_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(DataPlaneUnavailable, match=f'"rdma" needs an RDMA device, and {tmp_path}/none lists none'):
        check_request("127.0.0.1", "rdma", "", rdma_devices=tmp_path / "none")
    with pytest.raises(DataPlaneUnavailable, match="lists none"):
        check_request("127.0.0.1", "rdma", "", rdma_devices=tmp_path)


def test_an_rdma_device_that_is_not_there_is_refused_and_the_others_are_named(tmp_path: Path) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()
    check_request("127.0.0.1", "rdma", "mlx5_1", rdma_devices=tmp_path)
    check_request("127.0.0.1", "rdma", "", rdma_devices=tmp_path)
    with pytest.raises(DataPlaneUnavailable, match=r'"mlx5_9" is not in .*: mlx5_0, mlx5_1'):
        check_request("127.0.0.1", "rdma", "mlx5_9", rdma_devices=tmp_path)


@pytest.mark.parametrize(
    ("host", "protocol", "device", "message"),
    [
        ("", "tcp", "", "host is empty"),
        ("127.0.0.1", "nvlink", "", '"nvlink" is not one of tcp, rdma'),
        ("127.0.0.1", "tcp", "mlx5_0", "uses none"),
    ],
)
def test_requests_the_library_would_silently_ignore_are_refused(
    host: str, protocol: str, device: str, message: str
) -> None:
    with pytest.raises(DataPlaneUnavailable, match=message):
        create_engine("mooncake", host=host, protocol=protocol, device=device)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(MissingDataPlane, match=r"pip install 'pdmesh\[cpu\]'"):
        MooncakeEngine("127.0.0.1")


def test_a_missing_shared_library_says_which_packages_bring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(MissingDataPlane, match=r"libibverbs\.so\.1: .* libibverbs1 libnuma1 libcurl4"):
        MooncakeEngine("127.0.0.1")


def test_an_engine_starts_writes_and_leaves_without_a_word_or_a_delay() -> None:
    script = (
        "import ctypes\n"
        "from cache_runtime.transfer.engine import Region, Run\n"
        "from cache_runtime.transfer.mooncake_engine import MooncakeEngine\n"
        "memory = ctypes.create_string_buffer(b'x' * 64 + bytes(64))\n"
        "base = ctypes.addressof(memory)\n"
        "receiver, writer = MooncakeEngine('127.0.0.1'), MooncakeEngine('127.0.0.1')\n"
        "receiver.register(base + 64, 64), writer.register(base, 64)\n"
        "link = writer.open_peer(receiver.endpoint, [Region(base_address=base + 64, num_bytes=64)])\n"
        "link.write([Run(base, base + 64, 64)], timeout_s=9).result()\n"
        "assert memory.raw[:128] == b'x' * 128\n"
        "assert writer.num_native_engines == 2\n"
        "import time; print(time.monotonic())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    left_at_s = time.monotonic()
    assert (done.returncode, done.stderr) == (0, "")
    # A native destructor at exit would take a second for each of the three engines.
    assert left_at_s - float(done.stdout) < 2.0


def test_a_hung_peer_is_found_out_on_opening_and_holds_up_nobody(
    mooncake: MooncakePlane, mooncake_peer: ProcessPeer
) -> None:
    engine, source = mooncake.make_engine(), Memory(4096)
    engine.register(source.region.base_address, 4096)
    healthy = mooncake.start_peer(1 << 20)
    mooncake_peer.freeze()
    outcome: list[BaseException] = []

    def open_hung() -> None:
        try:
            engine.open_peer(mooncake_peer.endpoint, [mooncake_peer.region])
        except PeerUnreachable as error:
            outcome.append(error)

    opener = threading.Thread(target=open_hung)
    opener.start()
    link = engine.open_peer(healthy.endpoint, [healthy.region])
    source.array[:] = 7
    link.write([Run(source.region.base_address, healthy.region.base_address, 4096)], timeout_s=9).result(9)
    assert not outcome, "the healthy peer was served while the hung one was still being waited for"
    opener.join(20)
    assert "no answer within 2.0 s" in str(outcome[0])
    healthy.kill()


def test_a_peer_that_stops_after_the_opening_does_not_hold_up_the_poller(
    mooncake: MooncakePlane, mooncake_peer: ProcessPeer
) -> None:
    engine, source = mooncake.make_engine(), Memory(4096)
    engine.register(source.region.base_address, 4096)
    link = engine.open_peer(mooncake_peer.endpoint, [mooncake_peer.region])
    healthy = mooncake.start_peer(1 << 20)
    other = engine.open_peer(healthy.endpoint, [healthy.region])
    mooncake_peer.freeze()
    stuck = link.write([Run(source.region.base_address, mooncake_peer.region.base_address, 4096)], timeout_s=0.5)
    # The poller answers at once for another link, although this link's first write goes to a stopped peer.
    other.write([Run(source.region.base_address, healthy.region.base_address, 4096)], timeout_s=9).result(9)
    assert not stuck.done()
    with pytest.raises(TransferFailed):
        stuck.result(20)
    healthy.kill()


def test_a_peer_that_hangs_between_pre_flight_and_handshake_is_given_up_on(mooncake: MooncakePlane) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    body = json.dumps({"name": endpoint, "buffers": [{"addr": 4096, "length": 4096}]}).encode()

    def answer_once() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(4096)
            client.sendall(struct.pack("<QB", len(body) + 1, 1) + body)

    threading.Thread(target=answer_once, daemon=True).start()
    # The handshake's own connection waits in the listener's backlog: accepted by the kernel, answered by nobody.
    with pytest.raises(PeerUnreachable, match=r"no handshake within 2\.0 s"):
        mooncake.make_engine().open_peer(endpoint, [Region(base_address=4096, num_bytes=4096)])
    listener.close()


def test_a_write_ends_well_when_a_stopped_peer_goes_on_in_time(
    mooncake: MooncakePlane, mooncake_peer: ProcessPeer
) -> None:
    engine, source = mooncake.make_engine(), Memory(4096)
    source.array[:] = 9
    engine.register(source.region.base_address, 4096)
    link = engine.open_peer(mooncake_peer.endpoint, [mooncake_peer.region])
    mooncake_peer.freeze()
    future = link.write([Run(source.region.base_address, mooncake_peer.region.base_address, 4096)], timeout_s=9)
    mooncake_peer.process.send_signal(signal.SIGCONT)
    assert future.result(9).num_bytes == 4096
    assert np.array_equal(mooncake_peer.memory.array[:4096], source.array)


def test_an_inherited_engine_does_not_stop_a_forked_child_from_leaving(mooncake: MooncakePlane) -> None:
    engine = mooncake.make_engine()
    child = os.fork()
    if child == 0:
        # Drops the last reference, which would run the native destructor and hang.
        del engine
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_the_wrong_engine_at_an_endpoint_is_not_taken_for_the_peer(
    mooncake: MooncakePlane, mooncake_peer: ProcessPeer
) -> None:
    port = mooncake_peer.endpoint.rpartition(":")[2]
    with pytest.raises(PeerUnreachable, match=f'answers under another name, "127.0.0.1:{port}"'):
        mooncake.make_engine().open_peer(f"localhost:{port}", [Region(base_address=4096, num_bytes=1)])
