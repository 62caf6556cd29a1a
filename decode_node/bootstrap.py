"""Bootstrap: how a prefill node becomes a peer of this decode node.

The manifests must agree, and the data plane is proved by a nonce that the prefill node writes into a probe slot of
ours. Knows one address at a time: which peers there are, and when one is made anew, is the registry's affair.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdmesh.v1 import prefill_pb2, prefill_pb2_grpc

from cache_runtime.transfer.engine import TransferEngine
from cache_runtime.transfer.placement import check_bridgeable, logical_differences
from cache_runtime.transfer.plane_set import PlaneSet
from cache_runtime.transfer.schema import PlacementManifest
from node_runtime.adapters import AdapterId
from node_runtime.errors import IncompatiblePeer, InvalidRequest, RemoteError, TransferBroken
from node_runtime.handoff.probe import NONCE_BYTES, ProbeBuffer, nonce_key
from node_runtime.request_rules import check_incarnation, check_node_id
from node_runtime.rpc import Channel, Transport, connect
from node_runtime.wire.adapter import adapters_from_proto
from node_runtime.wire.manifest import manifest_from_proto, manifest_to_proto

_log = logging.getLogger(__name__)

BOOTSTRAP_TIMEOUT_S = 10.0


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillPeer:
    """One incarnation of a prefill node, with a connection of its own."""

    address: str
    node_id: str
    incarnation: int
    channel: Channel
    # What it writes our blocks through.
    plane: TransferEngine
    # What it can compute prompts with.
    adapters: frozenset[AdapterId] = frozenset()
    num_users: int = 0
    is_retired: bool = False
    # Told, in this order, when the node came back as another incarnation: nothing will come of handoffs with this one.
    on_restart: dict[Callable[[], None], None] = field(default_factory=dict)

    async def release(self) -> None:
        """Ends one use; the connection of a retired peer closes with its last."""
        self.num_users -= 1
        await self.close_if_unused()

    async def close_if_unused(self) -> None:
        if self.is_retired and self.num_users == 0:
            await self.channel.close()


class PeerBootstrap:
    """What this node tells of itself to prefill nodes, and holds against what they tell."""

    def __init__(
        self,
        *,
        node_id: str,
        incarnation: int,
        planes: PlaneSet,
        manifest: PlacementManifest,
        probes: ProbeBuffer,
        max_message_bytes: int,
        transport: Transport | None = None,
        adapters: Sequence[AdapterId] = (),
    ) -> None:
        """`adapters` are this node's."""
        self._node_id = node_id
        self._incarnation = incarnation
        self._planes = planes
        self._manifest = manifest
        # Told at each attempt, and the same for the life of the process.
        self._told_manifest = manifest_to_proto(manifest)
        self._probes = probes
        self._max_message_bytes = max_message_bytes
        self._transport = transport
        self._adapters = {adapter.name: adapter for adapter in adapters}

    async def peer_at(self, address: str) -> PrefillPeer:
        """A new peer with a connection of its own, which has no back-off to sit out.

        Raises PeerUnavailable, IncompatiblePeer, TransferBroken, or what the peer answered.
        """
        channel = connect(address, max_message_bytes=self._max_message_bytes, transport=self._transport)
        try:
            response = await self._prove(channel)
            adapters = self._check(address, response)
            plane = self._chosen_plane(address, response)
        except BaseException:
            await channel.close()
            raise
        peer = PrefillPeer(
            address=address,
            node_id=response.node_id,
            incarnation=response.incarnation,
            channel=channel,
            plane=plane,
            adapters=adapters,
        )
        self._warn_of_other_adapters(peer)
        return peer

    async def _prove(self, channel: Channel) -> prefill_pb2.BootstrapResponse:
        """Bootstrap, with the nonce read back from our own memory."""
        stub = channel.stub(prefill_pb2_grpc.PrefillStub)
        nonce = secrets.token_bytes(NONCE_BYTES)
        async with self._probes.slot() as slot:
            request = prefill_pb2.BootstrapRequest(
                node_id=self._node_id,
                incarnation=self._incarnation,
                manifest=self._told_manifest,
                nonce=nonce,
                nonce_address=slot.address,
            )
            permit = self._planes.allow(nonce_key(nonce), slot.spans)
            try:
                response = await channel.unary(stub.Bootstrap, request, timeout_s=BOOTSTRAP_TIMEOUT_S)
            finally:
                permit.revoke()
            if slot.read() != nonce:
                raise TransferBroken(
                    f"prefill node at {channel.address} says that it wrote the nonce, but it did not arrive through "
                    f"the data plane {response.data_plane or self._manifest.ranks[0].data_plane}"
                )
        return response

    def _check(self, address: str, response: prefill_pb2.BootstrapResponse) -> frozenset[AdapterId]:
        """Its adapters. Prompts of those that it has not, or not the same, are not for it; the others are."""
        try:
            check_node_id(response.node_id)
            check_incarnation(response.incarnation)
            manifest = manifest_from_proto(response.manifest)
            adapters = frozenset(adapters_from_proto(response.adapters))
        except InvalidRequest as error:
            # The peer's mistake and not the client's.
            raise RemoteError("INTERNAL", f"prefill node at {address} answers nonsense: {error.message}") from None
        differences = logical_differences(
            self._manifest.logical, manifest.logical, local_name="decode", peer_name="prefill"
        ) or check_bridgeable(manifest, self._manifest)
        if differences:
            raise IncompatiblePeer(f"prefill node {response.node_id} at {address}", differences)
        return adapters

    def _warn_of_other_adapters(self, peer: PrefillPeer) -> None:
        """Whoever exchanges an adapter node by node sees this for a while; nothing is computed with both."""
        for other in sorted(peer.adapters):
            own = self._adapters.get(other.name, other)
            if own != other:
                _log.warning(
                    "prefill node %s at %s has the adapter %s, this node %s: no prompt with it goes there",
                    peer.node_id,
                    peer.address,
                    other,
                    own,
                )

    def _chosen_plane(self, address: str, response: prefill_pb2.BootstrapResponse) -> TransferEngine:
        """Of the planes that we offered the one that the nonce came through."""
        name = response.data_plane or self._manifest.ranks[0].data_plane
        plane = self._planes.find(name)
        if plane is None:
            raise RemoteError(
                "INTERNAL", f'prefill node at {address} uses data plane "{name[:64]}", which was not offered'
            )
        return plane
