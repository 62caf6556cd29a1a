"""A decode or fused node as one whole engine: to callers that know no prefill nodes, it chooses them itself.

Prompts that begin alike go to the same prefill node, which has their beginning cached, unless that one is busier than
others. Where a prefill node fails a prompt before anything of the answer is there, another one gets it, or this node
computes it where its policy allows that. Lives on the event loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import numpy as np
from pdmesh.v1 import decode_pb2

from decode_node.bootstrap import PrefillPeer
from decode_node.peers import PrefillPeers
from decode_node.service import DecodeService
from node_runtime.errors import NodeError, NoPrefillNodeReady, PrefillFailed, RemoteError
from node_runtime.rpc import RpcContext, status_of

MAX_ATTEMPTS: Final = 3
# How many more handoffs than the least busy one a prefill node may have before prompts leave the node that knows them.
_MAX_EXTRA_HANDOFFS: Final = 2
_REFUSED: Final = "RESOURCE_EXHAUSTED"
_RETRIED: Final = frozenset(("UNAVAILABLE", "UNKNOWN", "DATA_LOSS", "CANCELLED", "FAILED_PRECONDITION", _REFUSED))
_ABOUT_THE_CALL_ITSELF: Final = frozenset(("UNKNOWN", "CANCELLED"))


class WholeEngine:
    """The Decode service without prefill addresses."""

    def __init__(
        self,
        decode: DecodeService,
        *,
        node_id: str,
        peers: PrefillPeers | None,
        prefills_locally: bool,
        prefix_granularity: int,
    ) -> None:
        """`peers` is None on a fused node; `prefills_locally`: a prompt without a prefill node is computed here."""
        self._decode = decode
        self._node_id = node_id
        self._peers = peers
        self._prefills_locally = prefills_locally
        self._prefix_granularity = prefix_granularity

    async def generate(
        self, request: decode_pb2.DecodeRequest, context: RpcContext
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """What the Decode service answers. `request` has no prefill address. Raises what that raises, or
        NoPrefillNodeReady.
        """
        failures: dict[str, NodeError] = {}
        while True:
            message = decode_pb2.DecodeRequest()
            message.CopyFrom(request)
            message.prefill_address = self._chosen_prefill(request.token_ids, failures)
            has_begun = False
            try:
                async with aclosing(self._decode.Generate(message, context)) as responses:
                    async for response in responses:
                        has_begun = True
                        yield response
                return
            except PrefillFailed as error:
                failures[message.prefill_address] = error
                if has_begun or status_of(error).name not in _RETRIED:
                    raise _as_told(error) from None

    def _chosen_prefill(self, token_ids: Sequence[int], failures: dict[str, NodeError]) -> str:
        """Its address; empty where this node computes the prompt. Raises the last failure when nobody else is left."""
        if self._peers is None:
            return ""
        ready = [peer for peer in self._peers.ready if peer.address not in failures]
        if ready and len(failures) < MAX_ATTEMPTS:
            beginning = np.asarray(token_ids[: self._prefix_granularity], dtype=np.int64).tobytes()
            return chosen_peer(ready, beginning).address
        # Load that prefill nodes refuse is not moved here: it would slow the streams that this node generates.
        if self._prefills_locally and all(status_of(error).name != _REFUSED for error in failures.values()):
            return ""
        for error in reversed(failures.values()):
            raise _as_told(error)
        known = "; ".join(f"{status.address}: {status.detail or status.state}" for status in self._peers.statuses())
        raise NoPrefillNodeReady(
            f"no prefill node of decode node {self._node_id} is ready: {known or 'none is listed'}"
        )


def _as_told(error: NodeError) -> NodeError:
    """For a caller who has cancelled nothing: how this node's own call of a prefill node broke is no news to them."""
    if status_of(error).name not in _ABOUT_THE_CALL_ITSELF:
        return error
    return RemoteError("UNAVAILABLE", error.message)


def chosen_peer(ready: Sequence[PrefillPeer], beginning: bytes) -> PrefillPeer:
    """Of the peers that are little busier than the least busy one, that which prompts of this beginning go to.

    Source: D. Thaler, C. Ravishankar, Using name-based mappings to increase hit rates, IEEE/ACM ToN 6(1), 1998.
    """
    least = min(peer.num_users for peer in ready)
    near = [peer for peer in ready if peer.num_users <= least + _MAX_EXTRA_HANDOFFS]
    return max(near, key=lambda peer: _weight(peer.node_id, beginning))


def _weight(node_id: str, beginning: bytes) -> bytes:
    return hashlib.blake2b(
        beginning, digest_size=8, key=hashlib.blake2b(node_id.encode(), digest_size=16).digest()
    ).digest()
