"""Has a prompt computed by a prefill node: finds the peer, runs the handoff, tries again when the peer was restarted.

Each attempt is a fresh handoff and a fresh request of the engine. Handoffs outlive the client's call; this is where
they are kept until nothing of them can touch our memory any more. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Callable

from cache_runtime.transfer.schema import PlacementManifest
from decode_node.bootstrap import PrefillPeer
from decode_node.fence import GrantFence
from decode_node.generation import Generation
from decode_node.peers import PrefillPeers
from decode_node.receiver import HandoffFailedError, IncomingHandoff, Received, may_retry
from decode_node.verification import TransferVerifier
from node_runtime.adapters import AdapterId
from node_runtime.clock import Clock
from node_runtime.engine.loop import EngineLoop
from node_runtime.errors import IncompatiblePeer, NodeError, PeerUnavailable, RemoteError, RequestCancelled
from node_runtime.handoff.messages import HANDOFF_ID_BYTES, Start
from node_runtime.log_context import bound_request_id
from node_runtime.rpc import Telemetry, TraceContext, current_context, span_names
from node_runtime.wire.decode import DecodeJob

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 2


class RemotePrefill:
    """The handoffs of one decode node."""

    def __init__(
        self,
        *,
        incarnation: int,
        peers: PrefillPeers,
        engine: EngineLoop,
        clock: Clock,
        telemetry: Telemetry,
        manifest: PlacementManifest,
        notice_bound_s: float,
        lease_s: float,
        vocab_size: int,
        verifier: TransferVerifier,
    ) -> None:
        """
        Args:
            manifest: Where this node's blocks lie.
            notice_bound_s: See DecodeHandoff.
            lease_s: What is granted to prefill nodes.
        """
        self._incarnation = incarnation
        self._peers = peers
        self._engine = engine
        self._clock = clock
        self._telemetry = telemetry
        self._handoffs = telemetry.metrics.counter(
            "pdmesh.handoffs", "{handoff}", "handoffs that ended, by the failure if they failed"
        )
        self._manifest = manifest
        self._notice_bound_s = notice_bound_s
        self._lease_ms = round(lease_s * 1000)
        self._vocab_size = vocab_size
        self._verifier = verifier
        self._tasks: dict[asyncio.Task[None], IncomingHandoff] = {}

    @property
    def num_handoffs(self) -> int:
        """Handoffs that are under way or whose blocks are quarantined."""
        return sum(not handoff.is_over for handoff in self._tasks.values())

    async def prefill(
        self, job: DecodeJob, address: str, make_generation: Callable[[], Generation], timeout_s: float
    ) -> tuple[Generation, Received, IncomingHandoff]:
        """Returns when the cache of the prompt is in place and the engine has its first token.

        `make_generation` makes the engine's side of one attempt. Raises NodeError; nothing of the request is left then
        but what a peer may still be writing. Cancelling it ends the handoff.
        """
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            peer, is_fresh = await self._peers.acquire(address)
            if job.adapter is not None and job.adapter not in peer.adapters:
                await peer.release()
                raise _without_adapter(job.adapter, peer)
            generation = make_generation()
            handoff = self._begin(job, peer, generation, timeout_s)
            try:
                received = await asyncio.shield(handoff.outcome)
            except HandoffFailedError as refusal:
                if attempt > 1 and _is_already_there(refusal.error):
                    # Our own first attempt, on a connection that broke on this side only, so far.
                    raise PeerUnavailable(peer.address, "it has not yet noticed how the attempt before ended") from None
                # One that was reached just now and is gone is left to whoever placed the request; one that wants
                # another bootstrap has lost this node in the meantime.
                is_gone = is_fresh and isinstance(refusal.error, PeerUnavailable)
                if attempt == _MAX_ATTEMPTS or is_gone or not may_retry(refusal):
                    raise refusal.error from None
                self._peers.suspect(peer, refusal.error.message)
            except asyncio.CancelledError:
                handoff.give_up(RequestCancelled("the client gave up or its deadline passed"))
                generation.abort()
                raise
            else:
                _check_prompt_logprobs(job, peer, received)
                return generation, received, handoff
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Cuts off the handoffs that are left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, job: DecodeJob, peer: PrefillPeer, generation: Generation, timeout_s: float) -> IncomingHandoff:
        wants_checksums = self._verifier.wants_next()
        start = Start(
            handoff_id=secrets.token_bytes(HANDOFF_ID_BYTES),
            request_id=job.request_id,
            token_ids=job.token_ids,
            sampling=job.sampling,
            extra_keys=job.extra_keys,
            adapter=job.adapter,
            decode_incarnation=self._incarnation,
            prefill_incarnation=peer.incarnation,
            lease_ms=self._lease_ms,
            wants_checksums=wants_checksums,
            checksum_kinds=self._verifier.digest_kinds if wants_checksums else (),
            num_output_tokens=job.num_output_tokens,
        )
        fence = GrantFence(peer.plane, self._manifest, start.handoff_id)
        handoff = IncomingHandoff(
            engine_id=generation.engine_id,
            start=start,
            peer=peer,
            engine=self._engine,
            clock=self._clock,
            fence=fence,
            drain_bound_s=peer.plane.drain_bound_s,
            notice_bound_s=self._notice_bound_s,
            vocab_size=self._vocab_size,
            verifier=self._verifier,
            on_suspect=lambda reason: self._peers.suspect(peer, reason),
            on_draining=lambda: self._peers.note_draining(peer),
        )
        generation.on_grant = handoff.on_grant
        generation.on_failure = handoff.give_up
        generation.submit()
        # A context of its own: the deadline of the client's call must not cut off the farewell to the peer.
        task = asyncio.create_task(
            self._run(handoff, peer, start, timeout_s, current_context()), context=contextvars.Context()
        )
        self._tasks[task] = handoff
        task.add_done_callback(self._tasks.pop)
        return handoff

    async def _run(
        self, handoff: IncomingHandoff, peer: PrefillPeer, start: Start, timeout_s: float, parent: TraceContext
    ) -> None:
        attributes = {
            span_names.PDMESH_REQUEST_ID: start.request_id,
            span_names.PDMESH_HANDOFF_ID: start.handoff_id.hex(),
            span_names.PDMESH_PREFILL_NODE: peer.node_id,
        }
        try:
            with (
                bound_request_id(start.request_id),
                self._telemetry.span(span_names.SPAN_HANDOFF, parent=parent, attributes=attributes) as span,
            ):
                await handoff.run(timeout_s)
                failure = handoff.failure
                self._handoffs.add(1, {} if failure is None else {span_names.ERROR_TYPE: type(failure).__name__})
                if isinstance(failure, RequestCancelled):
                    span.cancel()
                elif failure is not None:
                    span.fail(type(failure).__name__, failure.message)
        finally:
            await peer.release()


def _is_already_there(error: NodeError) -> bool:
    return isinstance(error, RemoteError) and error.code_name == "ALREADY_EXISTS"


def _without_adapter(wanted: AdapterId, peer: PrefillPeer) -> IncompatiblePeer:
    """One of an older release has none, and would compute without it."""
    of_that_name = [str(adapter) for adapter in peer.adapters if adapter.name == wanted.name]
    difference = f"adapter {wanted}: prefill={of_that_name[0] if of_that_name else 'none'}, decode=served"
    return IncompatiblePeer(f"prefill node {peer.node_id} at {peer.address}", (difference,))


def _check_prompt_logprobs(job: DecodeJob, peer: PrefillPeer, received: Received) -> None:
    """Raises IncompatiblePeer when a prefill node of an older release did not know what it was asked for."""
    is_wanted = job.sampling.num_prompt_logprobs is not None and len(job.token_ids) > 1
    if is_wanted and not received.done.prompt_logprobs:
        difference = "prompt log-probabilities: prefill=unknown, decode=wanted"
        raise IncompatiblePeer(f"prefill node {peer.node_id} at {peer.address}", (difference,))
