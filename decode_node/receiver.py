"""One handoff on the decode node: carries out what its session decides, and tells the session what happened.

The stream to the prefill node runs in a task of its own that outlives the client's call: after a cancellation it still
sends Abort and waits until the peer is quiet or its lease is over, for only then may the granted blocks be used again.
Lives on the event loop; engine updates arrive there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from pdmesh.v1 import handoff_pb2, prefill_pb2_grpc

from decode_node.bootstrap import PrefillPeer
from decode_node.fence import GrantFence
from decode_node.verification import TransferVerifier
from node_runtime.clock import Clock
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import AcceptFirstToken, GrantOffered, PostEvents
from node_runtime.errors import InvalidRequest, NodeError, NoMemoryInTime, PeerDraining, PeerUnavailable, RemoteError
from node_runtime.handoff.decode_session import DecodeHandoff
from node_runtime.handoff.events import (
    AbortScheduling,
    Allocated,
    Begin,
    DecodeAction,
    DecodeEvent,
    EndWithFailure,
    Fenced,
    GaveUp,
    MarkDone,
    MarkQuiesced,
    MarkReady,
    Send,
    StreamClosed,
    Tick,
    Verified,
    Verify,
)
from node_runtime.handoff.messages import Done, RequestMessage, Start
from node_runtime.handoff.states import DecodeState
from node_runtime.rpc import DuplexCall, code_number, error_from_code
from node_runtime.wire.handoff import request_to_proto, response_from_proto
from scheduler_core import AbortEvent, Event, QuiescedEvent, ReadyEvent

_log = logging.getLogger(__name__)

# What the control stream may outlive the request's deadline by, so that the peer can still say that it is quiet. Longer
# than a stopped writer needs: it posts nothing more, and what it posted ends within the data plane's drain bound.
QUIET_GRACE_S = 10.0
# How long the peer may take to end the stream of a handoff that is over.
_FAREWELL_S = 5.0
_RESOURCE_EXHAUSTED = 8
_INTERNAL = 13
_UNAVAILABLE = 14
_DATA_LOSS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A handoff that came to its end: the cache is in place and the first token accepted."""

    done: Done
    cached_tokens: int


class HandoffFailedError(Exception):
    """A handoff that came to nothing. `error` is for the client; `is_untouched` says that the peer computed nothing."""

    def __init__(self, error: NodeError, *, is_untouched: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.is_untouched = is_untouched


class IncomingHandoff:
    """Glue between one DecodeHandoff session, the engine and the stream to the prefill node."""

    def __init__(
        self,
        *,
        engine_id: str,
        start: Start,
        peer: PrefillPeer,
        engine: EngineLoop,
        clock: Clock,
        fence: GrantFence,
        drain_bound_s: float,
        notice_bound_s: float,
        vocab_size: int,
        verifier: TransferVerifier,
        on_suspect: Callable[[str], None],
        on_draining: Callable[[], None],
    ) -> None:
        """`on_suspect` hears why the peer must be bootstrapped anew before its next use, `on_draining` that it
        leaves and takes no other handoff.
        """
        self._engine_id = engine_id
        self._peer = peer
        self._engine = engine
        self._clock = clock
        self._fence = fence
        self._on_suspect = on_suspect
        self._on_draining = on_draining
        self._verifier = verifier
        self._wants_checksums = start.wants_checksums
        self._is_verified = False
        self._comparisons: set[asyncio.Task[None]] = set()
        self._session = DecodeHandoff(
            start,
            drain_bound_s=drain_bound_s,
            notice_bound_s=notice_bound_s,
            vocab_size=vocab_size,
            digests_per_block=verifier.digests_per_block,
        )
        self._outgoing: asyncio.Queue[RequestMessage] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()
        self._cached_tokens = 0
        self._was_ready = False
        self._draining: PeerDraining | None = None
        self.ready_at_s: float | None = None
        self.outcome: asyncio.Future[Received] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether nothing of the handoff can touch our memory any more."""
        return self._session.is_terminal

    @property
    def failure(self) -> NodeError | None:
        """Why the handoff came to nothing, if it did."""
        error = self.outcome.exception() if self.outcome.done() and not self.outcome.cancelled() else None
        return error.error if isinstance(error, HandoffFailedError) else None

    def on_grant(self, offer: GrantOffered) -> None:
        """The scheduler allocated memory for the prompt."""
        self._feed(Allocated(from_token=offer.from_token, groups=offer.groups))

    def give_up(self, error: NodeError) -> None:
        """Ends the handoff from this side. Without effect once it is over."""
        self._feed(GaveUp(code=code_number(error), message=error.message))

    async def run(self, timeout_s: float) -> None:
        """Talks to the prefill node until nothing of this handoff can touch our memory any more."""
        talking = asyncio.create_task(self._talk(timeout_s + QUIET_GRACE_S))
        self._peer.on_restart[self._peer_restarted] = None
        try:
            await self._over.wait()
            # The peer ends the stream; one that says no farewell is not waited for.
            await asyncio.wait((talking,), timeout=_FAREWELL_S)
        except asyncio.CancelledError:
            self._feed(StreamClosed(code=_UNAVAILABLE, message="this decode node stops"))
            raise
        finally:
            talking.cancel()
            self._cancel_timer()
            self._peer.on_restart.pop(self._peer_restarted, None)

    def _peer_restarted(self) -> None:
        self._feed(StreamClosed(code=_UNAVAILABLE, message="the prefill node was restarted"))

    async def _talk(self, timeout_s: float) -> None:
        try:
            closed = await self._exchange(timeout_s)
        except Exception:
            _log.exception("a handoff failed inside this node")
            self._feed(GaveUp(code=_INTERNAL, message="internal error; the log of the decode node has the details"))
            closed = StreamClosed(code=_INTERNAL, message="internal error")
        self._feed(closed)

    async def _exchange(self, timeout_s: float) -> StreamClosed:
        channel = self._peer.channel
        stub = channel.stub(prefill_pb2_grpc.PrefillStub)
        try:
            async with channel.duplex(stub.Handoff, timeout_s=timeout_s) as call:
                self._feed(Begin())
                sending = asyncio.create_task(self._send_all(call))
                try:
                    async for response in call:
                        self._receive(response)
                finally:
                    sending.cancel()
        except NodeError as error:
            return self._broken_off(error)
        return StreamClosed(code=_UNAVAILABLE, message="the prefill node ended the handoff without a result")

    async def _send_all(self, call: DuplexCall[handoff_pb2.HandoffRequest, handoff_pb2.HandoffResponse]) -> None:
        try:
            while True:
                await call.send(request_to_proto(await self._outgoing.get()))
        except NodeError as error:
            # The reader hears the same, with the peer's own status.
            _log.debug("the handoff can send nothing more: %s", error)

    def _receive(self, response: handoff_pb2.HandoffResponse) -> None:
        try:
            self._feed(response_from_proto(response))
        except InvalidRequest as error:
            reason = f"the prefill node broke the handoff protocol: {error.message}"
            self._on_suspect(reason)
            self._feed(GaveUp(code=_INTERNAL, message=reason))

    def _broken_off(self, error: NodeError) -> StreamClosed:
        if isinstance(error, PeerDraining):
            self._draining = error
            self._on_draining()
        if isinstance(error, PeerUnavailable):
            if not self._session.is_terminal:
                self._on_suspect(error.reason)
            return StreamClosed(code=_UNAVAILABLE, message=f"the prefill node broke off the handoff: {error.reason}")
        return StreamClosed(code=code_number(error), message=error.message)

    def _feed(self, event: DecodeEvent) -> None:
        for action in self._session.handle(event, self._clock.now_s()):
            self._carry_out(action)
        if self._session.state is DecodeState.VERIFYING:
            # Everything has landed: what is compared now must not change any more.
            self._fence.close()
        if self._fence.holds and self._session.state is DecodeState.QUARANTINED:
            # The fence was closed with the end of the handoff; there is nothing to wait for.
            self._feed(Fenced())
        self._set_timer()
        if self._session.is_terminal:
            self._over.set()

    def _set_timer(self) -> None:
        self._cancel_timer()
        at_s = self._session.wakeup_at_s
        if at_s is not None:
            delay_s = max(0.0, at_s - self._clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._feed, Tick())

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _carry_out(self, action: DecodeAction) -> None:
        self._fence.follow(action)
        match action:
            case Send():
                self._outgoing.put_nowait(action.message)
            case MarkReady():
                self._was_ready = True
                if self._wants_checksums:
                    self._fence.hash_as(self._session.checksum_kind)
                self._cached_tokens = action.cached_tokens
                self.ready_at_s = self._clock.now_s()
                self._post(ReadyEvent(self._engine_id))
            case Verify():
                self._is_verified = True
                task = asyncio.create_task(self._verify(action))
                self._comparisons.add(task)
                task.add_done_callback(self._comparisons.discard)
            case MarkDone():
                if self._is_verified:
                    self._verifier.count(is_damaged=False)
                self._engine.post(AcceptFirstToken(request_id=self._engine_id, token=action.done.first_token))
                if not self.outcome.done():
                    self.outcome.set_result(Received(done=action.done, cached_tokens=self._cached_tokens))
            case AbortScheduling():
                self._post(AbortEvent(self._engine_id))
            case MarkQuiesced():
                self._post(QuiescedEvent(self._engine_id))
            case EndWithFailure():
                self._fail(action)
            case _:
                assert_never(action)

    async def _verify(self, wanted: Verify) -> None:
        try:
            damage = await asyncio.to_thread(
                self._verifier.find_damage, wanted.groups, wanted.checksums, self._fence.digests
            )
        except Exception:
            _log.exception("a transfer cannot be verified")
            self._feed(GaveUp(code=_INTERNAL, message="internal error; the log of the decode node has the details"))
            return
        self._feed(Verified(damage=damage))

    def _fail(self, failure: EndWithFailure) -> None:
        if failure.code == _DATA_LOSS and self._is_verified:
            _log.error("handoff with prefill node %s: %s", self._peer.node_id, failure.message)
            self._verifier.count(is_damaged=True)
            self._on_suspect(failure.message)
        error = self._cause(failure)
        if self._was_ready and failure.code == _UNAVAILABLE:
            self._on_suspect(failure.message)
        if not self.outcome.done():
            self.outcome.set_exception(HandoffFailedError(error, is_untouched=not self._was_ready))
            # Nobody may be waiting any more; that is no fault.
            self.outcome.exception()

    def _cause(self, failure: EndWithFailure) -> NodeError:
        """The session knows codes only; whoever places the request wants to know more."""
        if self._draining is not None:
            return self._draining
        if self._was_ready and failure.code == _RESOURCE_EXHAUSTED:
            # Whoever says Ready is not full. It has waited in vain for memory of ours.
            return NoMemoryInTime(failure.message)
        return error_from_code(failure.code, failure.message, self._peer.address)

    def _post(self, event: Event) -> None:
        self._engine.post(PostEvents(events=(event,)))


def may_retry(refusal: HandoffFailedError) -> bool:
    """Whether a fresh bootstrap could help: the peer was restarted or lost, and had not begun with the prompt."""
    if not refusal.is_untouched:
        return False
    error = refusal.error
    if isinstance(error, PeerDraining):
        return False
    return isinstance(error, PeerUnavailable) or (
        isinstance(error, RemoteError) and error.code_name == "FAILED_PRECONDITION"
    )
