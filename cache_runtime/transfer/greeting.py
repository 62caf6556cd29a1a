"""How the two ends of a receiver-fenced connection introduce themselves, before any batch is sent.

The writer says which of its memory the receiver may map (where memory is shared) and hands the descriptors over; the
receiver answers with the memory that it exposes. Every call ends by a deadline, and nothing that arrives is trusted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .engine import Region
from .regions import RegionSet
from .timed_socket import receive_exactly, remaining_s

VERSION = 1
# As many descriptors as one message carries without being cut.
MAX_REGIONS = 64
_MAGIC = b"pdmeshDP"
_HEADER = struct.Struct("<8sHHI")  # magic, version, zero, number of regions that follow
_REGION = struct.Struct("<QQ")  # base address, bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRegion:
    """Registered memory that lies in a file from its first byte on."""

    region: Region
    descriptor: int


def greet(connection: socket.socket, shared: Sequence[SharedRegion], deadline_s: float) -> RegionSet:
    """The writer's part: what the receiver exposes. Raises OSError, TimeoutError, ValueError."""
    connection.settimeout(remaining_s(deadline_s))
    hello = _pack([item.region for item in shared])
    if shared:
        if socket.send_fds(connection, [hello], [item.descriptor for item in shared]) != len(hello):
            raise ValueError("the peer takes no greeting")
    else:
        connection.sendall(hello)
    return RegionSet(_receive_regions(connection, receive_exactly(connection, _HEADER.size, deadline_s), deadline_s))


@contextlib.contextmanager
def receive_greeting(
    connection: socket.socket, *, is_shared: bool, deadline_s: float
) -> Iterator[tuple[SharedRegion, ...]]:
    """The receiver's part: the memory that the writer shares, whose descriptors are open inside the context.

    Raises OSError, TimeoutError, ValueError.
    """
    connection.settimeout(remaining_s(deadline_s))
    descriptors: list[int] = []
    try:
        if is_shared:
            header, descriptors, flags, _ = socket.recv_fds(
                connection, _HEADER.size, MAX_REGIONS, socket.MSG_CMSG_CLOEXEC
            )
            if flags & socket.MSG_CTRUNC:
                raise ValueError(f"more than {MAX_REGIONS} descriptors")
            header += receive_exactly(connection, _HEADER.size - len(header), deadline_s)
        else:
            header = receive_exactly(connection, _HEADER.size, deadline_s)
        regions = _receive_regions(connection, header, deadline_s)
        if len(regions) != len(descriptors):
            raise ValueError(f"{len(regions)} regions with {len(descriptors)} descriptors")
        yield tuple(
            SharedRegion(region=region, descriptor=descriptor)
            for region, descriptor in zip(regions, descriptors, strict=True)
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def welcome(connection: socket.socket, exposed: RegionSet, deadline_s: float) -> None:
    """The receiver's answer. Raises OSError, TimeoutError."""
    connection.settimeout(remaining_s(deadline_s))
    connection.sendall(_pack(list(exposed)))


def _pack(regions: Sequence[Region]) -> bytes:
    rows = (_REGION.pack(region.base_address, region.num_bytes) for region in regions)
    return _HEADER.pack(_MAGIC, VERSION, 0, len(regions)) + b"".join(rows)


def _receive_regions(connection: socket.socket, header: bytes, deadline_s: float) -> list[Region]:
    magic, version, _, num_regions = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ValueError("no greeting of a data plane of ours")
    if version != VERSION:
        raise ValueError(f"version {version} of the data plane, {VERSION} is spoken here")
    if num_regions > MAX_REGIONS:
        raise ValueError(f"{num_regions} regions, at most {MAX_REGIONS} are taken")
    table = receive_exactly(connection, num_regions * _REGION.size, deadline_s)
    regions = [Region(base_address=base, num_bytes=num_bytes) for base, num_bytes in _REGION.iter_unpack(table)]
    RegionSet(regions)  # refuses those that overlap
    return regions
