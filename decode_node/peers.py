"""The prefill nodes that this decode node takes its caches from, by address and incarnation.

Configured addresses are connected to eagerly and watched; others when a request first names them. A failed handoff
makes its peer suspect: the next use bootstraps again. Lives on the event loop; what a bootstrap is, it does not know.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc

from decode_node.bootstrap import PeerBootstrap, PrefillPeer
from node_runtime.errors import NodeError, PeerDraining, PeerUnavailable
from node_runtime.rpc import watch_health

_log = logging.getLogger(__name__)

RETRY_BACKOFF_S = (0.1, 0.2, 0.5, 1.0)
# How often a configured peer that seems healthy is asked whether it still is the same process.
WATCH_INTERVAL_S = 5.0
_WATCH_TIMEOUT_S = 3.0
# Streams by which the health of peers is followed are renewed after this time: no call of ours is without a deadline.
_HEALTH_WATCH_S = 300.0


@dataclass(slots=True, eq=False)
class _Entry:
    """What is known about one address."""

    address: str
    peer: PrefillPeer | None = None
    detail: str = "not connected yet"
    is_suspect: bool = False
    is_draining: bool = False
    is_watched: bool = False
    attempt: asyncio.Task[None] | None = None  # the bootstrap under way
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_ready(self) -> bool:
        return self.peer is not None and not self.is_suspect and not self.is_draining

    @property
    def state(self) -> str:
        """As `PeerStatus.state` says it."""
        if self.is_ready:
            return "ready"
        if self.is_draining:
            return "draining"
        return "connecting" if self.peer is None else "suspect"

    def status(self) -> mesh_pb2.PeerStatus:
        return mesh_pb2.PeerStatus(
            node_id=self.peer.node_id if self.peer else "",
            address=self.address,
            incarnation=self.peer.incarnation if self.peer else 0,
            state=self.state,
            detail="" if self.is_ready else self.detail,
            data_plane=self.peer.plane.name if self.peer else "",
        )


class PrefillPeers:
    """Registry of prefill nodes."""

    def __init__(self, bootstrap: PeerBootstrap, on_change: Callable[[], None]) -> None:
        """`on_change` is called whenever a peer may have become ready or ceased to be."""
        self._bootstrap = bootstrap
        self._on_change = on_change
        self._entries: dict[str, _Entry] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._partings: set[asyncio.Task[None]] = set()

    def watch(self, addresses: Sequence[str]) -> None:
        """Keeps connections to these addresses from now on, and to no others. Handoffs with those that are left out go
        on.
        """
        for address in self._watchers.keys() - set(addresses):
            self._watchers.pop(address).cancel()
            entry = self._entries.pop(address)
            entry.is_watched = False
            _log.info("prefill node at %s is not looked after any more", address)
            parting = asyncio.create_task(self._part_with(entry))
            self._partings.add(parting)
            parting.add_done_callback(self._partings.discard)
            self._on_change()
        for address in addresses:
            if address not in self._watchers:
                entry = self._entries.setdefault(address, _Entry(address))
                entry.is_watched = True
                watcher = asyncio.create_task(self._keep_connected(entry), name=f"watch {address}")
                self._watchers[address] = watcher

    @property
    def has_ready(self) -> bool:
        return any(entry.is_ready for entry in self._entries.values())

    @property
    def ready(self) -> tuple[PrefillPeer, ...]:
        """The peers that a handoff can begin with now."""
        return tuple(entry.peer for entry in self._entries.values() if entry.is_ready and entry.peer is not None)

    def statuses(self) -> tuple[mesh_pb2.PeerStatus, ...]:
        return tuple(entry.status() for entry in self._entries.values())

    async def acquire(self, address: str) -> tuple[PrefillPeer, bool]:
        """The peer at `address`, bootstrapped now unless it is ready; True when it was bootstrapped by this call.

        The caller owes a `release`. Raises PeerUnavailable, IncompatiblePeer, or what the peer answered.
        """
        is_fresh = False
        while True:
            entry = self._entries.setdefault(address, _Entry(address))
            if entry.peer is not None and entry.is_ready:
                entry.peer.num_users += 1
                return entry.peer, is_fresh
            await self._bootstrapped(entry)
            is_fresh = True

    def suspect(self, peer: PrefillPeer, reason: str) -> None:
        """Bootstraps again before the next use of this address, unless that has happened already."""
        entry = self._entries.get(peer.address)
        if entry is None or entry.peer is not peer or not entry.is_ready:
            return
        _log.warning("prefill node %s at %s is suspect: %s", peer.node_id, peer.address, reason)
        entry.is_suspect = True
        entry.detail = reason
        entry.changed.set()
        self._on_change()

    def note_draining(self, peer: PrefillPeer) -> None:
        """The node leaves: it finishes the handoffs that it has, and is not asked for others until it is back."""
        entry = self._entries.get(peer.address)
        if entry is None or entry.peer is not peer or entry.is_draining:
            return
        _log.info("prefill node %s at %s is draining", peer.node_id, peer.address)
        entry.is_draining = True
        entry.detail = f"node {peer.node_id} is draining"
        entry.changed.set()
        self._on_change()

    async def close(self) -> None:
        attempts = [entry.attempt for entry in self._entries.values() if entry.attempt is not None]
        ending = (*self._watchers.values(), *self._partings, *attempts)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for entry in self._entries.values():
            if entry.peer is not None:
                await entry.peer.channel.close()
        self._entries.clear()

    async def _bootstrapped(self, entry: _Entry) -> None:
        """Joins the bootstrap under way, or begins one. All who wait share its outcome, so that a peer that cannot be
        reached costs each of them one attempt; it outlives a caller that leaves.
        """
        if entry.attempt is None:
            # A context of its own: the deadline of one client's call is not that of the others.
            entry.attempt = asyncio.create_task(self._attempt(entry), context=contextvars.Context())
            entry.attempt.add_done_callback(_heard)
        await asyncio.shield(entry.attempt)

    async def _attempt(self, entry: _Entry) -> None:
        try:
            await self._renew(entry)
        finally:
            entry.attempt = None
            if not entry.is_ready and not entry.is_watched:
                # Names that clients make up, and nodes that are gone, must not pile up.
                if self._entries.get(entry.address) is entry:
                    del self._entries[entry.address]
                await self._retire(entry.peer)

    async def _part_with(self, entry: _Entry) -> None:
        """Requests that wait for its bootstrap get to hear of it."""
        if entry.attempt is not None:
            await asyncio.wait((entry.attempt,))
        await self._retire(entry.peer)

    @staticmethod
    async def _retire(peer: PrefillPeer | None) -> None:
        if peer is not None:
            peer.is_retired = True
            await peer.close_if_unused()

    async def _renew(self, entry: _Entry) -> None:
        """Makes a new peer for the entry."""
        try:
            peer = await self._bootstrap.peer_at(entry.address)
        except BaseException as error:
            entry.detail = error.message if isinstance(error, NodeError) else "interrupted"
            entry.is_draining = isinstance(error, PeerDraining)
            if isinstance(error, PeerUnavailable) and not isinstance(error, PeerDraining):
                reason = f"the prefill node cannot be connected to: {error.reason}"
                raise PeerUnavailable(error.address, reason) from None
            raise
        old, entry.peer = entry.peer, peer
        entry.is_suspect = entry.is_draining = False
        entry.changed.set()
        _log.info("prefill node %s at %s is a peer: data plane %s", peer.node_id, entry.address, peer.plane.name)
        self._on_change()
        if old is not None and old.incarnation != peer.incarnation:
            for tell in tuple(old.on_restart):
                tell()
        await self._retire(old)

    # Watching configured addresses.

    async def _keep_connected(self, entry: _Entry) -> None:
        num_failures = 0
        while True:
            entry.changed.clear()
            if entry.peer is not None and entry.is_ready:
                num_failures = 0
                await self._watch_while_ready(entry, entry.peer)
                continue
            try:
                await self._bootstrapped(entry)
            except Exception as error:
                if num_failures == 0:
                    cause = None if isinstance(error, NodeError) else error
                    # A peer that was never there is a start-up order and one that leaves a farewell, not a fault.
                    is_expected = cause is None and (entry.peer is None or entry.is_draining)
                    level = logging.INFO if is_expected else logging.WARNING
                    _log.log(level, "prefill node at %s: %s; trying on", entry.address, error, exc_info=cause)
                backoff_s = RETRY_BACKOFF_S[min(num_failures, len(RETRY_BACKOFF_S) - 1)]
                num_failures += 1
                await _wait(entry.changed, backoff_s)

    async def _watch_while_ready(self, entry: _Entry, peer: PrefillPeer) -> None:
        """Until the entry is not ready any more, or has another peer."""
        following = asyncio.create_task(self._follow_health(peer))
        try:
            while entry.is_ready and entry.peer is peer:
                entry.changed.clear()
                await _wait(entry.changed, WATCH_INTERVAL_S)
                await self._check_alive(entry)
        finally:
            following.cancel()
            await asyncio.wait((following,))

    async def _follow_health(self, peer: PrefillPeer) -> None:
        """Hears at once when the peer drains: it answers questions about itself to the end, so asking whether it is
        alive would not tell. Runs until it is cancelled.
        """
        # As in `_check_alive`.
        peer.num_users += 1
        try:
            while True:
                try:
                    await self._hear_of_drain(peer)
                except NodeError as error:
                    _log.debug("the health of prefill node %s cannot be followed: %s", peer.node_id, error)
                await asyncio.sleep(WATCH_INTERVAL_S)
        finally:
            await peer.release()

    async def _hear_of_drain(self, peer: PrefillPeer) -> None:
        stub = peer.channel.stub(mesh_pb2_grpc.NodeStub)
        async with aclosing(watch_health(peer.channel, timeout_s=_HEALTH_WATCH_S)) as healths:
            async for is_serving in healths:
                if is_serving:
                    continue
                request = mesh_pb2.GetNodeStatusRequest()
                status = await peer.channel.unary(stub.GetNodeStatus, request, timeout_s=_WATCH_TIMEOUT_S)
                if status.draining:
                    self.note_draining(peer)

    async def _check_alive(self, entry: _Entry) -> None:
        peer = entry.peer
        if peer is None or not entry.is_ready:
            return
        stub = peer.channel.stub(mesh_pb2_grpc.NodeStub)
        # A use like any other: a channel that is closed under a call cancels whoever waits for it.
        peer.num_users += 1
        try:
            info = await peer.channel.unary(stub.GetNodeInfo, mesh_pb2.GetNodeInfoRequest(), timeout_s=_WATCH_TIMEOUT_S)
        except NodeError as error:
            self.suspect(peer, error.message)
            return
        finally:
            await peer.release()
        if info.incarnation != peer.incarnation:
            self.suspect(peer, "the prefill node was restarted")


def _heard(attempt: asyncio.Task[None]) -> None:
    """Whoever waited may have left; a failure that nobody hears is no fault."""
    if not attempt.cancelled():
        attempt.exception()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        # Not `wait_for`: until Python 3.12 it forgets a cancellation that comes in the moment of the event.
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
