"""Asks a Mooncake endpoint who it is, with a socket of our own and a hard time limit.

The native engine's own first contact blocks up to a minute under an engine-wide lock when the peer is stopped, hung or
something else altogether; this probe answers in milliseconds or gives up. Imports nothing native. The peer's answer is
not trusted.

Source: Mooncake P2P handshake framing, `u64 little-endian length | u8 message type | JSON`, type 1 = metadata.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass

from .engine import PeerUnreachable, Region
from .regions import RegionSet
from .timed_socket import parse_host_port, receive_exactly, remaining_s

MAX_REPLY_BYTES = 1 << 20
_METADATA_REQUEST = 1
_HEADER = struct.Struct("<QB")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDescription:
    """What a peer says about itself: its name and the memory it exposes."""

    name: str
    regions: RegionSet


def describe_peer(endpoint: str, *, timeout_s: float) -> PeerDescription:
    """Fetches the description of the engine at `endpoint` ("host:port").

    Raises `PeerUnreachable`, within `timeout_s`, when nothing, something else, or another engine answers there.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        reply = _fetch(endpoint, deadline_s)
        description = _parse(reply)
    except TimeoutError:
        raise PeerUnreachable(endpoint, f"no answer within {timeout_s} s") from None
    except OSError as error:
        raise PeerUnreachable(endpoint, error.strerror or str(error)) from None
    except ValueError as error:
        raise PeerUnreachable(endpoint, f"does not answer as a Mooncake engine: {error}") from None
    if description.name != endpoint:
        raise PeerUnreachable(endpoint, f'answers under another name, "{description.name[:256]}"')
    return description


def _fetch(endpoint: str, deadline_s: float) -> bytes:
    address = parse_host_port(endpoint)
    # The caller's own description goes here; an empty one is accepted and commits the peer to nothing.
    body = json.dumps({"name": "", "protocol": "tcp", "buffers": []}).encode()
    with socket.create_connection(address, remaining_s(deadline_s)) as connection:
        connection.settimeout(remaining_s(deadline_s))
        connection.sendall(_HEADER.pack(len(body) + 1, _METADATA_REQUEST) + body)
        num_bytes, kind = _HEADER.unpack(receive_exactly(connection, _HEADER.size, deadline_s))
        if kind != _METADATA_REQUEST or not 1 < num_bytes <= MAX_REPLY_BYTES:
            raise ValueError(f"reply of type {kind} and {num_bytes} bytes, limit {MAX_REPLY_BYTES}")
        return receive_exactly(connection, num_bytes - 1, deadline_s)


def _parse(reply: bytes) -> PeerDescription:
    try:
        document: object = json.loads(reply)
    except RecursionError:
        raise ValueError("reply is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("reply is not an object")
    name, buffers = document.get("name"), document.get("buffers")
    if not isinstance(name, str) or not isinstance(buffers, list):
        raise ValueError("reply lacks name or buffers")
    return PeerDescription(name=name, regions=RegionSet(_region(item) for item in buffers))


def _region(item: object) -> Region:
    if not isinstance(item, dict):
        raise ValueError("a buffer is not an object")
    address, length = item.get("addr"), item.get("length")
    if not isinstance(address, int) or not isinstance(length, int):
        raise ValueError("a buffer lacks addr or length")
    return Region(base_address=address, num_bytes=length)
