"""The decode nodes that this prefill node may write to: one entry per incarnation, made by Bootstrap.

Bootstrap compares the manifests, opens a peer link and proves it by writing the caller's nonce. A link whose write
failed makes its peer suspect: handoffs are refused until the peer bootstrapped again. Lives on the event loop; only
the blocking part of opening a link leaves it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdmesh.v1 import mesh_pb2

from cache_runtime.transfer.engine import PeerLink, Region, Run, TransferError, TransferRejected, TransferReport
from cache_runtime.transfer.placement import check_bridgeable, logical_differences
from cache_runtime.transfer.plane_set import ChosenLink, PlaneSet
from cache_runtime.transfer.schema import PlacementManifest, PlaneOffer, RankPlacement
from node_runtime.errors import IncompatiblePeer, InvalidRequest, NotBootstrapped, PeerUnavailable
from node_runtime.handoff.checks import GrantedGroup
from node_runtime.handoff.probe import NONCE_BYTES, ProbeBuffer, nonce_key
from node_runtime.request_rules import check_incarnation, check_node_id

_log = logging.getLogger(__name__)

MAX_PEERS = 256
_NONCE_TIMEOUT_S = 5.0


@dataclass(slots=True, kw_only=True)
class DecodePeer:
    """One incarnation of a decode node."""

    node_id: str
    incarnation: int
    targets: tuple[RankPlacement, ...]  # of its tensor ranks, which one link reaches
    groups: Mapping[str, GrantedGroup]
    link: PeerLink
    data_plane: str
    suspect_reason: str = ""
    num_handoffs: int = 0
    # Told, in this order, when the node came back as another incarnation: nobody is left who could want the handoffs of
    # this one.
    on_restart: dict[Callable[[], None], None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a decode node says about itself in Bootstrap."""

    node_id: str
    incarnation: int
    manifest: PlacementManifest
    nonce: bytes
    nonce_address: int

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES:
            raise InvalidRequest(f"nonce: {len(self.nonce)} bytes given, {NONCE_BYTES} required")
        if not 0 < self.nonce_address < 1 << 62:
            raise InvalidRequest(f"nonce_address: {self.nonce_address} given, (0, 2**62) required")
        check_node_id(self.node_id)
        check_incarnation(self.incarnation)


@dataclass(slots=True)
class _Turn:
    """Who bootstraps an incarnation now, and how many want to."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_callers: int = 0


@dataclass(slots=True)
class DecodePeers:
    """Registry of decode nodes."""

    planes: PlaneSet
    manifest: PlacementManifest
    probes: ProbeBuffer
    _peers: dict[int, DecodePeer] = field(default_factory=dict)
    _turns: dict[int, _Turn] = field(default_factory=dict)

    async def bootstrap(self, caller: Introduction) -> str:
        """Makes the caller a peer, or proves an existing one anew; returns the data plane that leads to it.

        Raises IncompatiblePeer naming every difference, InvalidRequest, or PeerUnavailable naming the endpoint.
        """
        self._check_compatible(caller)
        async with self._turn(caller.incarnation):
            known = self._peers.get(caller.incarnation)
            if known is not None and not known.suspect_reason and known.targets == caller.manifest.ranks:
                await self._prove_again(caller, known)
                return known.data_plane
            chosen = await self._open(caller, caller.manifest.ranks[0].offers, with_arenas=True)
            self._admit(caller, chosen)
            return chosen.data_plane

    @asynccontextmanager
    async def _turn(self, incarnation: int) -> AsyncIterator[None]:
        """One bootstrap of an incarnation at a time. What waits is bounded by its own call."""
        turn = self._turns.setdefault(incarnation, _Turn())
        turn.num_callers += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.num_callers -= 1
            if not turn.num_callers:
                del self._turns[incarnation]

    def find(self, incarnation: int) -> DecodePeer:
        """The peer of that incarnation. Raises NotBootstrapped when there is none or its link is broken."""
        peer = self._peers.get(incarnation)
        if peer is None:
            raise NotBootstrapped("decode_incarnation: this prefill node was not bootstrapped with it")
        if peer.suspect_reason:
            raise NotBootstrapped(f"decode node {peer.node_id} must be bootstrapped again: {peer.suspect_reason}")
        return peer

    def suspect(self, peer: DecodePeer, reason: str) -> None:
        """Takes no handoff of this peer until it bootstrapped again."""
        if not peer.suspect_reason:
            _log.warning("decode node %s is suspect: %s", peer.node_id, reason)
            peer.suspect_reason = reason

    def statuses(self) -> tuple[mesh_pb2.PeerStatus, ...]:
        return tuple(
            mesh_pb2.PeerStatus(
                node_id=peer.node_id,
                address=peer.link.peer,
                incarnation=peer.incarnation,
                state="suspect" if peer.suspect_reason else "ready",
                detail=peer.suspect_reason,
                data_plane=peer.data_plane,
            )
            for peer in self._peers.values()
        )

    def close(self) -> None:
        for peer in self._peers.values():
            peer.link.close()
        self._peers.clear()

    def _check_compatible(self, caller: Introduction) -> None:
        differences = logical_differences(
            self.manifest.logical, caller.manifest.logical, local_name="prefill", peer_name="decode"
        )
        if not differences:
            differences = check_bridgeable(self.manifest, caller.manifest)
        if differences:
            raise IncompatiblePeer(f"decode node {caller.node_id}", differences)

    async def _prove_again(self, caller: Introduction, known: DecodePeer) -> None:
        """Proves the way to a known peer without touching the link that its handoffs use."""
        offers = [offer for offer in known.targets[0].offers if offer.name == known.data_plane]
        chosen = await self._open(caller, offers, with_arenas=False)
        chosen.link.close()

    async def _open(self, caller: Introduction, offers: Sequence[PlaneOffer], *, with_arenas: bool) -> ChosenLink:
        """A link over one of the offered planes, through which the nonce has been written."""
        regions = [Region(base_address=caller.nonce_address, num_bytes=NONCE_BYTES)]
        if with_arenas:
            regions += (
                Region(base_address=rank.arena_base, num_bytes=rank.arena_bytes) for rank in caller.manifest.ranks
            )
        opening = asyncio.ensure_future(asyncio.to_thread(self.planes.open_peer, offers, regions))
        try:
            chosen = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread cannot be stopped; the link that it makes is nobody's.
            opening.add_done_callback(_close_link)
            raise
        except TransferRejected as error:
            raise InvalidRequest(f"the memory of the manifest cannot be written to: {error}") from None
        except TransferError as error:
            raise PeerUnavailable(error.peer, f"data plane of {caller.node_id}: {error.reason}") from None
        except ValueError as error:
            raise InvalidRequest(f"nonce_address and arenas: {error}") from None
        try:
            await self._write_nonce(caller, chosen.link)
        except BaseException:
            chosen.link.close()
            raise
        return chosen

    async def _write_nonce(self, caller: Introduction, link: PeerLink) -> None:
        async with self.probes.slot() as slot:
            slot.fill(caller.nonce)
            run = Run(slot.address, caller.nonce_address, NONCE_BYTES)
            writing = asyncio.wrap_future(link.write([run], key=nonce_key(caller.nonce), timeout_s=_NONCE_TIMEOUT_S))
            writing.add_done_callback(_heard)
            try:
                # Shielded: the slot must not be reused while the write may still read it.
                await asyncio.shield(writing)
            except TransferError as error:
                raise PeerUnavailable(error.peer, f"data plane of {caller.node_id}: {error.reason}") from None
            finally:
                if not writing.done():
                    await asyncio.wait((writing,))

    def _admit(self, caller: Introduction, chosen: ChosenLink) -> None:
        ranks = caller.manifest.ranks
        # A grant names blocks by one id for all ranks.
        groups = {
            group.group_id: GrantedGroup.of(group, min(rank.find_num_blocks(group.group_id) or 0 for rank in ranks))
            for group in caller.manifest.logical.groups
        }
        for old in [peer for peer in self._peers.values() if self._is_replaced(peer, caller)]:
            self._retire(old)
            if old.incarnation != caller.incarnation:
                _log.info("decode node %s was restarted: dropping %d handoffs", old.node_id, len(old.on_restart))
                for tell in tuple(old.on_restart):
                    tell()
        self._make_room()
        self._peers[caller.incarnation] = DecodePeer(
            node_id=caller.node_id,
            incarnation=caller.incarnation,
            targets=ranks,
            groups=groups,
            link=chosen.link,
            data_plane=chosen.data_plane,
        )
        _log.info("decode node %s is a peer: data plane %s at %s", caller.node_id, chosen.data_plane, chosen.link.peer)

    @staticmethod
    def _is_replaced(peer: DecodePeer, caller: Introduction) -> bool:
        """The same process with a fresh link, or the predecessor of a restarted node."""
        return peer.incarnation == caller.incarnation or peer.node_id == caller.node_id

    def _retire(self, peer: DecodePeer) -> None:
        del self._peers[peer.incarnation]
        peer.link.close()

    def _make_room(self) -> None:
        """Decode nodes that restart under new names must not pile up: the oldest idle peers go first."""
        idle = [peer for peer in self._peers.values() if not peer.num_handoffs]
        for peer in idle[: max(0, len(self._peers) + 1 - MAX_PEERS)]:
            self._retire(peer)


def _close_link(opening: asyncio.Future[ChosenLink]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().link.close()


def _heard(writing: asyncio.Future[TransferReport]) -> None:
    """The caller may have left before the write failed; a failure that nobody hears is no fault."""
    if not writing.cancelled():
        writing.exception()
