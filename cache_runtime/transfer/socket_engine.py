"""A receiver-fenced data plane over connections: one socket per peer link, one thread at each of its ends.

The threads spend their time in native code without the interpreter lock. Here is what surrounds it: who may connect,
what is registered, what is allowed, and how everything ends. Knows no handoffs.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from cache_runtime.shared_memory import MappedMemory

from ._native import GrantTable, NativePermit, Receiver
from .engine import (
    EngineClosed,
    PeerUnreachable,
    PlaneKind,
    Region,
    Spans,
    TransferRejected,
)
from .greeting import MAX_REGIONS, SharedRegion, greet, receive_greeting, welcome
from .regions import RegionSet, check_permit, open_regions
from .socket_link import SocketPeerLink
from .transport import Transport

_LOG = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 2.0
# A peer that takes nothing and answers nothing for this long is given up.
PROGRESS_TIMEOUT_S = 5.0
# Two for each peer that a node can have (one is being proved anew), and some to spare.
MAX_CONNECTIONS = 1024
_ACCEPT_BACKOFF_S = 0.1
_LEAVE_TIMEOUT_S = 1.0


class SocketEngine:
    """`TransferEngine` of the two-sided kind."""

    kind = PlaneKind.TWO_SIDED
    # A revoked permit needs no waiting for.
    drain_bound_s = 0.0

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
    ) -> None:
        """Receives from now on. Owns the transport's listener."""
        self.clock = clock
        self.progress_timeout_s = progress_timeout_s
        self._transport = transport
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._regions = RegionSet()
        self._shared: tuple[SharedRegion, ...] = ()
        self._grants = GrantTable()
        self._links: set[SocketPeerLink] = set()
        self._served: dict[int, socket.socket] = {}  # accepted connections by number
        self._numbers = itertools.count(1)
        self._threads: set[threading.Thread] = set()
        # A thread that comes back from native code while the interpreter is torn down aborts the process.
        atexit.register(self._leave)
        self._start_thread("accept", self._accept)

    @property
    def name(self) -> str:
        return self._transport.name

    @property
    def protocol(self) -> str:
        return self._transport.protocol

    @property
    def endpoint(self) -> str:
        return self._transport.endpoint

    @property
    def num_refused_runs(self) -> int:
        return self._grants.num_refused_pieces

    @property
    def regions(self) -> RegionSet:
        return self._regions

    def register(self, base_address: int, num_bytes: int, *, shared_descriptor: int | None = None) -> None:
        self.check_usable()
        region = Region(base_address=base_address, num_bytes=num_bytes)
        with self._lock:
            if len(self._regions) == MAX_REGIONS:
                raise ValueError(f"{MAX_REGIONS} regions are registered already, which is as many as a peer takes")
            self._regions = self._regions.with_region(region)
            if shared_descriptor is not None:
                self._shared = (*self._shared, SharedRegion(region=region, descriptor=shared_descriptor))

    def allow(self, key: bytes, spans: Spans, *, hashed_as: str | None = None) -> NativePermit:
        self.check_usable()
        check_permit(key, spans, self._regions)
        try:
            return self._grants.allow(key, spans, hashed_as)
        except RuntimeError as error:
            raise EngineClosed(self.endpoint, str(error)) from None

    def open_peer(self, endpoint: str, regions: Sequence[Region]) -> SocketPeerLink:
        self.check_usable()
        targets = open_regions(regions)
        shared = self._shared if self._transport.is_shared else ()
        connection, exposed = self._reach(endpoint, shared)
        try:
            for region in targets:
                if not exposed.covers(region):
                    raise TransferRejected(endpoint, f"the peer does not expose {region}")
            link = SocketPeerLink(
                self,
                endpoint,
                connection,
                targets,
                sources=RegionSet(item.region for item in shared) if self._transport.is_shared else None,
            )
            with self._lock:
                self.check_usable()
                self._links.add(link)
        except BaseException:
            connection.close()
            raise
        self._start_thread(f"write-{endpoint}", link.run)
        return link

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links, served = tuple(self._links), tuple(self._served.values())
        # First of all: from here on nothing lands.
        self._grants.close()
        # Wakes the accepting thread, which closes it.
        _shut_down(self._transport.listener)
        for connection in served:
            _shut_down(connection)
        for link in links:
            link.end(EngineClosed(link.peer, "the engine is closed"))

    def check_usable(self) -> None:
        """Raises `EngineClosed` when the engine is closed or was inherited by a forked child."""
        if os.getpid() != self._pid:
            raise EngineClosed(self.endpoint, f"the engine belongs to process {self._pid}, not to its forked child")
        if self._closed:
            raise EngineClosed(self.endpoint, "the engine is closed")

    def is_own(self) -> bool:
        """Whether this process made the engine; a lock that a fork left behind must not be waited for."""
        return os.getpid() == self._pid

    def forget(self, link: SocketPeerLink) -> None:
        """The link's thread has ended."""
        with self._lock:
            self._links.discard(link)

    def _reach(self, endpoint: str, shared: Sequence[SharedRegion]) -> tuple[socket.socket, RegionSet]:
        """A connection on which both sides have introduced themselves. Raises `PeerUnreachable`."""
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        try:
            connection = self._transport.connect(endpoint, deadline_s)
            try:
                exposed = greet(connection, shared, deadline_s)
            except BaseException:
                connection.close()
                raise
        except TimeoutError:
            raise PeerUnreachable(endpoint, f"no answer within {OPEN_TIMEOUT_S} s") from None
        except OSError as error:
            raise PeerUnreachable(endpoint, error.strerror or str(error)) from None
        except ValueError as error:
            raise PeerUnreachable(endpoint, f"does not answer as a {self.name} engine: {error}") from None
        connection.settimeout(None)
        return connection, exposed

    # The receiving end.

    def _accept(self) -> None:
        listener = self._transport.listener
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if not self._closed:
                    _LOG.warning("data plane %s at %s cannot accept: %s", self.name, self.endpoint, error)
                    time.sleep(_ACCEPT_BACKOFF_S)
                continue
            with self._lock:
                is_taken = not self._closed and len(self._served) < MAX_CONNECTIONS
                number = next(self._numbers)
                if is_taken:
                    self._served[number] = connection
            if is_taken:
                self._start_thread("receive", partial(self._serve, number, connection))
            else:
                connection.close()
        listener.close()

    def _serve(self, number: int, accepted: socket.socket) -> None:
        """Body of a receiving thread."""
        try:
            reason = self._receive(number, accepted)
        except TimeoutError:
            reason = f"no greeting within {OPEN_TIMEOUT_S} s"
        except (OSError, ValueError) as error:
            reason = str(error)
        finally:
            with self._lock:
                del self._served[number]
            accepted.close()
        if reason and not self._closed:
            _LOG.info("data plane %s at %s ended a connection: %s", self.name, self.endpoint, reason)

    def _receive(self, number: int, accepted: socket.socket) -> str:
        """Serves one connection to its end; returns what was wrong with it, if anything."""
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        is_shared = self._transport.is_shared
        with contextlib.closing(self._transport.secure(accepted, deadline_s)) as connection:
            with self._lock:
                self._served[number] = connection
            with receive_greeting(connection, is_shared=is_shared, deadline_s=deadline_s) as shared:
                mapped = [(item.region, MappedMemory(item.descriptor, item.region.num_bytes)) for item in shared]
            welcome(connection, self._regions, deadline_s)
            connection.settimeout(None)
            if self._closed:
                return ""
            sources = [(region.base_address, region.num_bytes, memory.base_address) for region, memory in mapped]
            return Receiver(self._grants, connection.fileno(), is_shared, sources).serve()

    def _start_thread(self, purpose: str, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=body, name=f"pdmesh-{self.name}-{purpose}", daemon=True)
        with self._lock:
            self._threads = {*(known for known in self._threads if known.is_alive()), thread}
            thread.start()

    def _leave(self) -> None:
        self.close()
        if self.is_own():
            deadline_s = time.monotonic() + _LEAVE_TIMEOUT_S
            for thread in tuple(self._threads):
                thread.join(max(0.0, deadline_s - time.monotonic()))


def _shut_down(connection: socket.socket) -> None:
    """Ends it for whoever waits on it, here and at the other side; a forked child may still hold a copy."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
