"""One handoff on the prefill node: carries out what its session decides, and tells the session what happened.

Everything here runs on the event loop's thread. Engine updates and transfer news arrive there by
`call_soon_threadsafe`; the stream's reader feeds the peer's messages; `outgoing` holds what the stream still has to
send. The object outlives its stream while posted writes are not terminal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import numpy as np

from cache_runtime.transfer.engine import (
    LinkCrowded,
    TransferError,
)
from cache_runtime.transfer.peer_hasher import NodeHasher
from node_runtime.clock import Clock
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import (
    GenerationEnded,
    GrantOffered,
    HandoverOffered,
    Invoke,
    PostEvents,
    RequestAdmitted,
    RequestFailed,
    RequestRetracted,
    SubmitRequest,
    TokenGenerated,
    Update,
)
from node_runtime.errors import InternalError, InvalidRequest, LinkBusy, NodeError, TransferBroken
from node_runtime.handoff.events import (
    AbortScheduling,
    Admitted,
    ChecksumsTaken,
    Completed,
    Drained,
    EndWithFailure,
    ExtendWriting,
    FailScheduling,
    GaveUp,
    MarkGranted,
    MarkHandedOver,
    MarkQuiesced,
    PrefillAction,
    PrefillEvent,
    Progressed,
    Send,
    StartWriting,
    StopWriting,
    StreamClosed,
    SubmitPrompt,
    Tick,
)
from node_runtime.handoff.messages import Checksums, Done, Grant, HandoffTimings, ResponseMessage, Start
from node_runtime.handoff.prefill_session import PrefillHandoff
from node_runtime.handoff.states import PrefillState
from node_runtime.rpc import code_number
from prefill_node.checksums import ChecksumNews, ChecksumsComplete, TransferChecksums
from prefill_node.outgoing import (
    OutgoingTransfer,
    TransferDrained,
    TransferFault,
    TransferLanded,
    TransferNews,
    TransferSummary,
)
from prefill_node.peers import DecodePeer, DecodePeers
from prefill_node.sender import PrefillSender
from scheduler_core import (
    AbortEvent,
    Event,
    FailedEvent,
    GrantedEvent,
    HandedOverEvent,
    QuiescedEvent,
    RequestSpec,
)

if TYPE_CHECKING:
    from model_runtime.sampler import SampledToken
    from model_runtime.text.grammar import TokenMatcher

_log = logging.getLogger(__name__)

# How long one write may wait for its turn on the link, and from there on for the data plane to take more of it. The
# decode node holds memory meanwhile, and another prefill node may have a link that is free.
LINK_WAIT_S = 10.0
_UNAVAILABLE = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """Ends the control stream: in good order, or with the error that becomes its status."""

    error: NodeError | None = None


@dataclass(slots=True, kw_only=True)
class Progress:
    """What has been measured so far. Monotonic seconds."""

    started_at_s: float
    admitted_at_s: float | None = None
    cached_tokens: int = 0
    first_token: SampledToken | None = None
    first_token_at_s: float | None = None
    prompt_logprobs: tuple[SampledToken, ...] = ()
    is_handed_over: bool = False
    transfer: TransferSummary | None = None
    # None until all were sent.
    num_checksum_parts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumTools:
    """What the checksums of a prefill node's transfers are taken with."""

    hasher: NodeHasher
    executor: Executor
    # Kinds of digests that this node can take.
    kinds: tuple[str, ...]

    def begin(
        self,
        handoff_id: bytes,
        peer: DecodePeer,
        tell: Callable[[ChecksumNews], None],
        on_fault: Callable[[Exception], None],
        kind: str,
    ) -> TransferChecksums:
        """The checksums of one handoff to `peer`, digests of `kind`; both callables are called on any thread."""
        return TransferChecksums(
            self.hasher.for_peer(len(peer.targets)),
            self.executor,
            handoff_id=handoff_id,
            tell=tell,
            on_fault=on_fault,
            link_hashes=peer.link.hashes,
            kind=kind,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTools:
    """What every handoff of a prefill node works with."""

    engine: EngineLoop
    sender: PrefillSender
    peers: DecodePeers
    clock: Clock
    checksums: ChecksumTools
    grant_bound_s: float


class PromptHandoff:
    """Glue between one PrefillHandoff session, the engine, the sender and the control stream."""

    def __init__(
        self,
        *,
        engine_id: str,
        peer: DecodePeer,
        tools: HandoffTools,
        check_start: Callable[[Start], None],
        check_grant: Callable[[Start, Grant], None],
        on_terminal: Callable[[], None],
        matcher: TokenMatcher | None = None,
    ) -> None:
        """
        Args:
            engine_id: Name of the request inside this node; unique for the life of the process.
            matcher: Says which first tokens there may be.
            on_terminal: Called once, when the handoff holds nothing any more.
        """
        self._engine_id = engine_id
        self._peer = peer
        self._tools = tools
        self._event_loop = asyncio.get_running_loop()
        self._session = PrefillHandoff(
            check_start=check_start,
            check_grant=check_grant,
            checksum_kinds=tools.checksums.kinds,
            grant_bound_s=tools.grant_bound_s,
        )
        self._on_terminal = on_terminal
        self._matcher = matcher
        self._transfer: OutgoingTransfer | None = None
        self._granted_blocks: Mapping[str, int] = {}
        self._request_id = ""
        self._handoff_id = b""
        self._wants_checksums = False
        self._broken_rule: InvalidRequest | None = None
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self._mark = (0, 0)
        self.progress = Progress(started_at_s=tools.clock.now_s())
        self.outgoing: asyncio.Queue[ResponseMessage | StreamEnd] = asyncio.Queue()

    @property
    def state(self) -> PrefillState:
        return self._session.state

    @property
    def granted_blocks(self) -> Mapping[str, int]:
        """By cache group; empty before the grant."""
        return self._granted_blocks

    def is_attempt_of(self, start: Start) -> bool:
        """Whether the decode node of `start` is being served the same request here."""
        return (
            self._request_id == start.request_id
            and self._peer.incarnation == start.decode_incarnation
            and self._session.state is not PrefillState.DRAINING
        )

    def open(self, start: Start) -> None:
        """Submits the prompt. Raises InvalidRequest for a Start that breaks a rule; nothing is held then."""
        for action in self._session.handle(start, self._tools.clock.now_s()):
            self._carry_out(action)
        self._request_id = start.request_id
        self._handoff_id = start.handoff_id
        self._wants_checksums = start.wants_checksums

    def feed(self, event: PrefillEvent) -> None:
        """Takes one event. A peer that breaks the protocol ends its own handoff and nothing else."""
        try:
            actions = self._session.handle(event, self._tools.clock.now_s())
        except InvalidRequest as error:
            self.refuse(error)
            return
        for action in actions:
            self._carry_out(action)
        self._set_timer()
        if self._session.is_terminal and not self._is_over:
            self._is_over = True
            self._tools.sender.forget(self._engine_id)
            self.outgoing.put_nowait(StreamEnd(error=self._broken_rule))
            self._on_terminal()

    def refuse(self, error: InvalidRequest) -> None:
        """Ends a handoff whose peer broke a rule; the stream ends in that error as well."""
        self._broken_rule = self._broken_rule or error
        self.give_up(error)

    def drop(self) -> None:
        """Ends a handoff whose decode node was restarted."""
        self.feed(StreamClosed(code=_UNAVAILABLE, message="the decode node was restarted"))

    def give_up(self, error: NodeError) -> None:
        self.feed(GaveUp(code=code_number(error), message=error.message))

    def _carry_out(self, action: PrefillAction) -> None:
        match action:
            case Send():
                self.outgoing.put_nowait(action.message)
            case SubmitPrompt():
                self._submit(action.start)
            case MarkGranted():
                self._post(GrantedEvent(self._engine_id))
            case StartWriting():
                self._start_writing(action.grant, action.post_until_s)
            case ExtendWriting():
                self._writing().extend(action.post_until_s)
            case StopWriting():
                self._writing().stop()
            case MarkHandedOver():
                self._post(HandedOverEvent(self._engine_id))
            case AbortScheduling():
                self._post(AbortEvent(self._engine_id))
            case FailScheduling():
                self._post(FailedEvent(self._engine_id))
            case MarkQuiesced():
                self._post(QuiescedEvent(self._engine_id))
            case EndWithFailure():
                _log.info("handoff given up: %s", action.message)
            case _:
                assert_never(action)

    def _post(self, event: Event) -> None:
        self._tools.engine.post(PostEvents(events=(event,)))

    def _submit(self, start: Start) -> None:
        spec = RequestSpec(
            request_id=self._engine_id,
            tokens=np.asarray(start.token_ids, dtype=np.int32),
            max_new_tokens=1,
            extra_keys=start.isolation_keys,
        )
        self._tools.engine.post(
            SubmitRequest(
                spec=spec,
                sampling=start.sampling,
                stop=None,
                sink=self._on_update,
                num_output_tokens=start.num_output_tokens,
                matcher=self._matcher,
                adapter=None if start.adapter is None else start.adapter.name,
            )
        )

    def _start_writing(self, grant: Grant, post_until_s: float) -> None:
        self._granted_blocks = {group.group_id: len(group.block_ids) for group in grant.groups}
        self._transfer = OutgoingTransfer(
            self._peer.link,
            self._hop,
            key=grant.handoff_id,
            now_s=self._tools.clock.now_s,
            write_timeout_s=LINK_WAIT_S,
            post_until_s=post_until_s,
        )
        checksums = None
        if self._wants_checksums:
            checksums = self._tools.checksums.begin(
                grant.handoff_id, self._peer, self._hop, self._transfer.fail, self._session.checksum_kind
            )
        self._tools.sender.grant(self._engine_id, grant, self._peer.targets, self._transfer, checksums)
        # A busy engine looks at the next stage; an idle one must be woken.
        self._tools.engine.post(Invoke(action=self._tools.sender.poll))

    def _writing(self) -> OutgoingTransfer:
        if self._transfer is None:
            raise InternalError("the handoff has begun no transfer")
        return self._transfer

    # Time.

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_s = self._session.wakeup_at_s
        if at_s is not None:
            delay_s = max(0.0, at_s - self._tools.clock.now_s())
            self._timer = self._event_loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        landed = 0 if self._transfer is None else self._transfer.num_landed_runs
        mark = (self._tools.sender.num_stages, landed)
        if mark != self._mark:
            self._mark = mark
            self.feed(Progressed())
        self.feed(Tick())

    # What the other threads report.

    def _hop(self, news: TransferNews | ChecksumNews) -> None:
        """Called by the engine's, the data plane's or the checksums' thread."""
        try:
            self._event_loop.call_soon_threadsafe(self._on_news, news)
        except RuntimeError:
            _log.debug("transfer news came after the event loop was closed")

    def _on_news(self, news: TransferNews | ChecksumNews) -> None:
        match news:
            case Checksums():
                self.feed(ChecksumsTaken(checksums=news))
            case ChecksumsComplete():
                self.progress.num_checksum_parts = news.num_parts
                self._complete_if_whole()
            case TransferLanded():
                self.progress.transfer = news.summary
                self._complete_if_whole()
            case TransferFault():
                self._on_fault(news.error)
            case TransferDrained():
                self.feed(Drained())
            case _:
                assert_never(news)

    def _on_fault(self, error: Exception) -> None:
        if isinstance(error, LinkCrowded):
            self.give_up(LinkBusy(f"the link to decode node {self._peer.node_id} is crowded: {error.reason}"))
        elif isinstance(error, TransferError):
            # A new link would break its other handoffs off.
            if not error.spares_peer:
                self._tools.peers.suspect(self._peer, str(error))
            self.give_up(TransferBroken(f"the data plane to decode node {self._peer.node_id} failed: {error}"))
        else:
            self.give_up(InternalError("the cache of the prompt could not be sent; the prefill node's log says why"))

    def _on_update(self, update: Update) -> None:
        match update:
            case RequestAdmitted():
                self.progress.admitted_at_s = update.at_s
                hits = (update.device_hit_tokens, update.host_hit_tokens, update.storage_hit_tokens)
                self.progress.cached_tokens = sum(hits)
                self.feed(Admitted(cached_tokens=sum(hits)))
            case TokenGenerated():
                self.progress.first_token = update.token
                self.progress.first_token_at_s = update.at_s
                self.progress.prompt_logprobs = update.prompt_logprobs
            case HandoverOffered():
                self.progress.is_handed_over = True
                self._complete_if_whole()
            case RequestFailed():
                self.give_up(update.error)
            case RequestRetracted() | GrantOffered() | GenerationEnded():
                raise InternalError(f"{type(update).__name__} does not belong to the prefill role")
            case _:
                assert_never(update)

    def _complete_if_whole(self) -> None:
        progress = self.progress
        if not progress.is_handed_over or progress.transfer is None or progress.first_token is None:
            return
        if self._wants_checksums and progress.num_checksum_parts is None:
            return
        done = Done(
            handoff_id=self._handoff_id,
            first_token=progress.first_token,
            transferred_bytes=progress.transfer.num_bytes,
            transferred_blocks=sum(self._granted_blocks.values()),
            transferred_runs=progress.transfer.num_runs,
            timings=measured_timings(progress),
            num_checksum_parts=progress.num_checksum_parts or 0,
            prompt_logprobs=progress.prompt_logprobs,
        )
        self.feed(Completed(done=done))


def measured_timings(progress: Progress) -> HandoffTimings:
    """Milliseconds per phase; what has not happened counts 0."""
    started, admitted, computed = progress.started_at_s, progress.admitted_at_s, progress.first_token_at_s
    if admitted is None or computed is None:
        return HandoffTimings()
    transfer = progress.transfer
    return HandoffTimings(
        queue_ms=_ms(admitted - started),
        compute_ms=_ms(computed - admitted),
        transfer_ms=0.0 if transfer is None else _ms(transfer.busy_s()),
        transfer_exposed_ms=0.0 if transfer is None else _ms(transfer.busy_s(since_s=computed)),
    )


def _ms(seconds: float) -> float:
    return max(0.0, seconds * 1000.0)
