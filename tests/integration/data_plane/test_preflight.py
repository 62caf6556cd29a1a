"""The pre-flight against servers that are not what they should be."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from cache_runtime.transfer.engine import PeerUnreachable, Region
from cache_runtime.transfer.preflight import MAX_REPLY_BYTES, describe_peer

Behaviour = Callable[[socket.socket, str], None]


@pytest.fixture
def serve() -> Iterator[Callable[[Behaviour], str]]:
    """Starts a server that treats its one client as told; returns its endpoint."""
    listeners: list[socket.socket] = []

    def start(behaviour: Behaviour) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"

        def treat() -> None:
            try:
                client, _ = listener.accept()
                with client:
                    behaviour(client, endpoint)
            except OSError:
                return

        threading.Thread(target=treat, daemon=True).start()
        return endpoint

    yield start
    for listener in listeners:
        listener.close()


def frame(body: bytes, *, kind: int = 1, num_bytes: int | None = None) -> bytes:
    return struct.pack("<QB", len(body) + 1 if num_bytes is None else num_bytes, kind) + body


def replying(make_body: Callable[[str], object]) -> Behaviour:
    def behave(client: socket.socket, endpoint: str) -> None:
        client.recv(4096)
        client.sendall(frame(json.dumps(make_body(endpoint)).encode()))
        client.recv(1)

    return behave


def sending(data: bytes) -> Behaviour:
    def behave(client: socket.socket, endpoint: str) -> None:
        client.recv(4096)
        client.sendall(data)
        client.recv(1)

    return behave


def test_a_proper_answer_gives_name_and_regions(serve: Callable[[Behaviour], str]) -> None:
    endpoint = serve(replying(lambda name: {"name": name, "buffers": [{"addr": 8192, "length": 64, "name": name}]}))
    description = describe_peer(endpoint, timeout_s=5)
    assert description.name == endpoint
    assert list(description.regions) == [Region(base_address=8192, num_bytes=64)]


def test_the_request_is_a_metadata_request(serve: Callable[[Behaviour], str]) -> None:
    seen: list[bytes] = []

    def behave(client: socket.socket, endpoint: str) -> None:
        seen.append(client.recv(4096))
        client.sendall(frame(json.dumps({"name": endpoint, "buffers": []}).encode()))

    describe_peer(serve(behave), timeout_s=5)
    num_bytes, kind = struct.unpack("<QB", seen[0][:9])
    assert (num_bytes, kind) == (len(seen[0]) - 8, 1)
    assert json.loads(seen[0][9:])["buffers"] == []


@pytest.mark.parametrize(
    "body",
    [
        [],
        7,
        None,
        {"buffers": []},
        {"name": 5, "buffers": []},
        {"name": "x"},
        {"name": "x", "buffers": {}},
        {"name": "x", "buffers": [5]},
        {"name": "x", "buffers": [{"addr": 1}]},
        {"name": "x", "buffers": [{"addr": -4096, "length": 64}]},
        {"name": "x", "buffers": [{"addr": 4096, "length": 0}]},
        {"name": "x", "buffers": [{"addr": 4096, "length": 1 << 64}]},
        {"name": "x", "buffers": [{"addr": 4096, "length": 64}, {"addr": 4100, "length": 64}]},
        {"name": "x", "buffers": [{"addr": 1.5, "length": "64"}]},
    ],
)
def test_answers_that_describe_no_engine_are_refused(serve: Callable[[Behaviour], str], body: object) -> None:
    with pytest.raises(PeerUnreachable, match="does not answer as a Mooncake engine"):
        describe_peer(serve(replying(lambda name: body)), timeout_s=5)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frame(b"", num_bytes=1),
        frame(b"{}", kind=2),
        frame(b"", num_bytes=MAX_REPLY_BYTES + 1),
        frame(b"", num_bytes=(1 << 64) - 1),
        frame(b"not json"),
        frame(b"\xff\xfe"),
        frame(b"[" * 100_000),
    ],
)
def test_bytes_that_are_no_answer_are_refused(serve: Callable[[Behaviour], str], data: bytes) -> None:
    with pytest.raises(PeerUnreachable, match="does not answer as a Mooncake engine"):
        describe_peer(serve(sending(data)), timeout_s=5)


def test_another_engine_at_the_address_is_refused_by_its_name(serve: Callable[[Behaviour], str]) -> None:
    with pytest.raises(PeerUnreachable, match=r'another name, "10\.9\.9\.9:15000"'):
        describe_peer(serve(replying(lambda name: {"name": "10.9.9.9:15000", "buffers": []})), timeout_s=5)


def test_a_silent_server_is_given_up_on(serve: Callable[[Behaviour], str]) -> None:
    endpoint = serve(sending(b""))
    with pytest.raises(PeerUnreachable, match=r"no answer within 0\.2 s"):
        describe_peer(endpoint, timeout_s=0.2)


def test_a_server_that_drips_bytes_cannot_stretch_the_limit(serve: Callable[[Behaviour], str]) -> None:
    stop = threading.Event()

    def drip(client: socket.socket, endpoint: str) -> None:
        client.recv(4096)
        client.sendall(struct.pack("<QB", 10_000, 1))
        while not stop.wait(0.02):
            client.sendall(b" ")

    with pytest.raises(PeerUnreachable, match=r"no answer within 0\.3 s"):
        describe_peer(serve(drip), timeout_s=0.3)
    stop.set()


def test_a_server_that_hangs_up_is_refused(serve: Callable[[Behaviour], str]) -> None:
    with pytest.raises(PeerUnreachable):
        describe_peer(serve(lambda client, name: None), timeout_s=5)


@pytest.mark.parametrize("endpoint", ["", "host", "host:", "host:port", "host:0", "host:65536", ":", "memory:1x"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(PeerUnreachable, match="not host:port"):
        describe_peer(endpoint, timeout_s=1)
