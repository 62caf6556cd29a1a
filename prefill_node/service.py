"""The Prefill service: bootstraps decode nodes and carries handoffs.

It checks what a peer says before anything is started, names requests inside this node so that no late event of an old
one can touch a new one, and relays between the gRPC stream and `PromptHandoff`. It knows no scheduler, no arena, no
engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pdmesh.v1 import handoff_pb2, prefill_pb2

from cache_runtime.transfer.schema import PlacementManifest
from node_runtime.adapters import AdapterId, ServedAdapters
from node_runtime.engine.output_forms import OutputForms
from node_runtime.engine.pulse import EngineWatch
from node_runtime.errors import (
    DuplicateRequest,
    EngineStalled,
    InternalError,
    InvalidRequest,
    NotBootstrapped,
    QueueFull,
    RequestTooLarge,
)
from node_runtime.handoff.checks import check_grant, check_start
from node_runtime.handoff.events import StreamClosed
from node_runtime.handoff.messages import Grant, Start
from node_runtime.handoff.states import PrefillState
from node_runtime.log_context import bound_request_id
from node_runtime.rpc import PhaseRecorder, RpcContext, Span, SpanKind, Telemetry, span_names
from node_runtime.wire.adapter import adapters_to_proto
from node_runtime.wire.handoff import request_from_proto, response_to_proto
from node_runtime.wire.manifest import manifest_from_proto, manifest_to_proto
from prefill_node.handoff import HandoffTools, Progress, PromptHandoff, StreamEnd
from prefill_node.peers import DecodePeer, Introduction
from prefill_node.used_ids import UsedHandoffIds

if TYPE_CHECKING:
    from model_runtime.text.grammar import TokenMatcher

_log = logging.getLogger(__name__)

_CANCELLED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """What bounds one prompt and the queue of this node."""

    vocab_size: int
    context_tokens: int
    max_request_tokens: int
    max_waiting_requests: int


class PrefillService:
    """Servicer of pdmesh.v1.Prefill. Lives on the event loop."""

    def __init__(
        self,
        *,
        node_id: str,
        incarnation: int,
        manifest: PlacementManifest,
        limits: PrefillLimits,
        tools: HandoffTools,
        telemetry: Telemetry,
        forms: OutputForms,
        watch: EngineWatch,
        adapters: Sequence[AdapterId] = (),
    ) -> None:
        self._node_id = node_id
        self._incarnation = incarnation
        self._manifest = manifest
        # Told at each bootstrap, and the same for the life of the process.
        self._told_manifest = manifest_to_proto(manifest)
        self._limits = limits
        self._tools = tools
        self._forms = forms
        self._watch = watch
        self._adapters = tuple(adapters)
        self._served_adapters = ServedAdapters(node_id, adapters)
        self._telemetry = telemetry
        self._phases = PhaseRecorder(telemetry, tools.clock)
        self._sent_bytes = telemetry.metrics.counter("pdmesh.transfer", "By", "cache written into decode nodes")
        # By the name of the request inside this node.
        self._live: dict[str, PromptHandoff] = {}
        self._used_ids = UsedHandoffIds()
        self._serials = itertools.count(1)

    @property
    def num_handoffs(self) -> int:
        """Handoffs that hold something on this node, drained ones not counted."""
        return len(self._live)

    def give_all_up(self) -> None:
        """Ends every handoff because the engine stands still: the prompts may be computed elsewhere meanwhile."""
        for handoff in tuple(self._live.values()):
            handoff.give_up(EngineStalled(self._node_id))

    async def Bootstrap(
        self, request: prefill_pb2.BootstrapRequest, context: RpcContext
    ) -> prefill_pb2.BootstrapResponse:
        caller = Introduction(
            node_id=request.node_id,
            incarnation=request.incarnation,
            manifest=manifest_from_proto(request.manifest),
            nonce=request.nonce,
            nonce_address=request.nonce_address,
        )
        data_plane = await self._tools.peers.bootstrap(caller)
        return prefill_pb2.BootstrapResponse(
            node_id=self._node_id,
            incarnation=self._incarnation,
            manifest=self._told_manifest,
            data_plane=data_plane,
            adapters=adapters_to_proto(self._adapters),
        )

    async def Handoff(
        self, requests: AsyncIterable[handoff_pb2.HandoffRequest], context: RpcContext
    ) -> AsyncIterator[handoff_pb2.HandoffResponse]:
        messages = aiter(requests)
        start = await self._first_message(messages)
        matcher = await self._forms.matcher(start.sampling.form, start.output_token_ids)
        with (
            bound_request_id(start.request_id),
            self._telemetry.span(
                span_names.SPAN_PREFILL_REQUEST, kind=SpanKind.SERVER, attributes=self._attributes(start)
            ) as span,
        ):
            handoff = self._open(start, matcher)
            reader = asyncio.create_task(self._read(messages, handoff))
            try:
                while not isinstance(item := await handoff.outgoing.get(), StreamEnd):
                    yield response_to_proto(item)
                if item.error is not None:
                    raise item.error
            finally:
                reader.cancel()
                handoff.feed(StreamClosed(code=_CANCELLED, message="the control stream ended"))
                self._record(span, handoff)

    @staticmethod
    async def _first_message(messages: AsyncIterator[handoff_pb2.HandoffRequest]) -> Start:
        async for message in messages:
            start = request_from_proto(message)
            if isinstance(start, Start):
                return start
            break
        raise InvalidRequest("the first message of a handoff must be Start")

    def _open(self, start: Start, matcher: TokenMatcher | None) -> PromptHandoff:
        """Checks everything, then submits. Nothing is held when it raises."""
        if start.prefill_incarnation != self._incarnation:
            raise NotBootstrapped("prefill_incarnation: this prefill node was restarted since the bootstrap")
        if self._watch.is_stalled:
            raise EngineStalled(self._node_id)
        peer = self._tools.peers.find(start.decode_incarnation)
        self._used_ids.check(start.handoff_id)
        self._check_unique(start)
        self._check_queue()
        engine_id = f"{start.request_id}#{next(self._serials)}"
        handoff = PromptHandoff(
            engine_id=engine_id,
            peer=peer,
            tools=self._tools,
            check_start=self._check_start,
            check_grant=partial(self._check_grant, peer),
            on_terminal=partial(self._forget, engine_id, peer),
            matcher=matcher,
        )
        handoff.open(start)
        self._used_ids.add(start.handoff_id)
        self._live[engine_id] = handoff
        peer.num_handoffs += 1
        peer.on_restart[handoff.drop] = None
        return handoff

    def _check_unique(self, start: Start) -> None:
        """One handoff per request and decode node. What was given up counts no more, nor does another node's attempt: a
        router places a request anew before this node knows that the first one is lost.
        """
        if any(handoff.is_attempt_of(start) for handoff in self._live.values()):
            raise DuplicateRequest(start.request_id)

    def _check_queue(self) -> None:
        num_waiting = sum(handoff.state is PrefillState.QUEUED for handoff in self._live.values())
        if num_waiting >= self._limits.max_waiting_requests:
            raise QueueFull(
                f"{num_waiting} prompts wait on prefill node {self._node_id}, "
                f"max_waiting_requests={self._limits.max_waiting_requests}"
            )

    def _check_start(self, start: Start) -> None:
        limits = self._limits
        self._served_adapters.resolve(start.adapter)
        check_start(start, vocab_size=limits.vocab_size, context_tokens=limits.context_tokens)
        # One place for the first token, which this node samples.
        if len(start.token_ids) + 1 > limits.max_request_tokens:
            raise RequestTooLarge(
                f"token_ids: {len(start.token_ids)} tokens given, the arena of prefill node {self._node_id} holds "
                f"max_request_tokens={limits.max_request_tokens} for one request"
            )

    def _check_grant(self, peer: DecodePeer, start: Start, grant: Grant) -> None:
        check_grant(
            grant,
            num_prompt_tokens=len(start.token_ids),
            prefix_granularity=self._manifest.logical.prefix_granularity,
            groups=peer.groups,
        )

    def _forget(self, engine_id: str, peer: DecodePeer) -> None:
        peer.num_handoffs -= 1
        peer.on_restart.pop(self._live.pop(engine_id).drop, None)

    @staticmethod
    async def _read(messages: AsyncIterator[handoff_pb2.HandoffRequest], handoff: PromptHandoff) -> None:
        """Feeds what the peer sends. Its half-close says nothing: the stream itself ends with the call."""
        try:
            async for message in messages:
                handoff.feed(request_from_proto(message))
        except InvalidRequest as error:
            handoff.refuse(error)
        except Exception:
            _log.exception("the messages of a handoff cannot be taken")
            handoff.give_up(InternalError("internal error; the log of the prefill node has the details"))

    # Telemetry.

    def _attributes(self, start: Start) -> dict[str, str | int]:
        adapter = {} if start.adapter is None else {span_names.PDMESH_ADAPTER: start.adapter.name}
        return {
            **adapter,
            span_names.PDMESH_REQUEST_ID: start.request_id,
            span_names.PDMESH_NODE_ID: self._node_id,
            span_names.PDMESH_HANDOFF_ID: start.handoff_id.hex(),
            span_names.GEN_AI_USAGE_INPUT_TOKENS: len(start.token_ids),
        }

    def _record(self, span: Span, handoff: PromptHandoff) -> None:
        """The phases, measured on the engine's and the data plane's threads, as children of the request's span."""
        progress = handoff.progress
        span.set(span_names.PDMESH_CACHED_TOKENS_PREFILL_DEVICE, progress.cached_tokens)
        for name, begin_s, end_s in _phases(progress):
            self._phases.record(span, name, begin_s, end_s)
        transfer = progress.transfer
        if transfer is not None and transfer.busy:
            busy_s = transfer.busy_s()
            blocks = handoff.granted_blocks
            attributes = {
                span_names.PDMESH_TRANSFER_BYTES: transfer.num_bytes,
                span_names.PDMESH_TRANSFER_RUNS: transfer.num_runs,
                span_names.PDMESH_TRANSFER_BLOCKS: sum(blocks.values()),
                span_names.PDMESH_TRANSFER_BUSY_MS: busy_s * 1000.0,
                span_names.PDMESH_TRANSFER_BYTES_PER_S: transfer.num_bytes / busy_s if busy_s else 0.0,
                **{f"{span_names.PDMESH_TRANSFER_BLOCKS_OF_GROUP}.{group}": count for group, count in blocks.items()},
            }
            begin_s, end_s = transfer.busy[0].begin_s, transfer.busy[-1].end_s
            self._phases.record(span, span_names.SPAN_TRANSFER, begin_s, end_s, attributes)
            self._sent_bytes.add(transfer.num_bytes, {})


def _phases(progress: Progress) -> list[tuple[str, float, float]]:
    phases = []
    if progress.admitted_at_s is not None:
        phases.append((span_names.SPAN_PREFILL_QUEUE, progress.started_at_s, progress.admitted_at_s))
        if progress.first_token_at_s is not None:
            phases.append((span_names.SPAN_PREFILL_COMPUTE, progress.admitted_at_s, progress.first_token_at_s))
    return phases
