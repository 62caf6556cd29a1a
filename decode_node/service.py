"""The Decode service, of decode and fused nodes: validates, has the prompt computed, streams the tokens.

Everything about a request is checked before anything is started anywhere. Whatever ends a call, the client leaving
included, ends the request on every node. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from pdmesh.v1 import decode_pb2

from decode_node.generation import Generation, Measured
from decode_node.local_prefill import LocalPrefill, LocalReason
from decode_node.receiver import IncomingHandoff, Received
from decode_node.remote_prefill import RemotePrefill
from model_runtime.sampler import SampledToken
from node_runtime.adapters import ServedAdapters
from node_runtime.clock import Clock
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import GenerationEnded
from node_runtime.engine.output_forms import OutputForms
from node_runtime.engine.pulse import EnginePulse, EngineWatch
from node_runtime.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineStalled,
    NodeError,
    NoMemoryInTime,
    NoPrefillNode,
    PeerDraining,
    PrefillDraining,
    PrefillFailed,
    QueueFull,
    RequestCancelled,
    RequestTooLarge,
)
from node_runtime.handoff.messages import HandoffTimings
from node_runtime.log_context import bound_request_id
from node_runtime.rpc import PhaseRecorder, RpcContext, Span, SpanKind, Telemetry, span_names, status_of
from node_runtime.wire.decode import DecodeJob, job_from_proto, progress_to_proto, tokens_to_proto
from node_runtime.wire.outcome import (
    CachedTokens,
    DecodeAdmitted,
    DecodeFinish,
    Timings,
    Usage,
    admitted_to_proto,
    finish_to_proto,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """What bounds one request and the queue of this node."""

    vocab_size: int
    context_tokens: int
    max_request_tokens: int
    max_waiting_requests: int


@dataclass(slots=True, kw_only=True)
class _Live:
    """A request of this node, from its validation to its last message."""

    job: DecodeJob
    measured: Measured
    generation: Generation | None = None
    handoff: IncomingHandoff | None = None
    received: Received | None = None
    local_reason: LocalReason | None = None

    @property
    def is_waiting(self) -> bool:
        return self.measured.admitted_at_s is None


class DecodeService:
    """Servicer of pdmesh.v1.Decode."""

    def __init__(
        self,
        *,
        node_id: str,
        model_name: str,
        limits: DecodeLimits,
        engine: EngineLoop,
        clock: Clock,
        telemetry: Telemetry,
        remote: RemotePrefill | None,
        local: LocalPrefill | None,
        forms: OutputForms,
        watch: EngineWatch,
        adapters: ServedAdapters,
    ) -> None:
        """`remote` and `local` are None on a fused node, which computes all prompts and ignores prefill addresses."""
        self._node_id = node_id
        self._model_name = model_name
        self._limits = limits
        self._engine = engine
        self._clock = clock
        self._telemetry = telemetry
        self._phases = PhaseRecorder(telemetry, clock)
        self._remote = remote
        self._local = local
        self._forms = forms
        self._watch = watch
        self._adapters = adapters
        self._live: dict[str, _Live] = {}
        self._serials = itertools.count(1)

    async def Generate(
        self, request: decode_pb2.DecodeRequest, context: RpcContext
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        arrived_at_s = self._clock.now_s()
        job = job_from_proto(
            request,
            vocab_size=self._limits.vocab_size,
            context_tokens=self._limits.context_tokens,
            seed_if_absent=secrets.randbits(63),
        )
        job = replace(job, adapter=self._adapters.resolve(job.adapter))
        self._check(job)
        with (
            bound_request_id(job.request_id),
            self._claim(job, arrived_at_s) as live,
            self._telemetry.span(
                span_names.SPAN_DECODE_REQUEST, kind=SpanKind.SERVER, attributes=self._attributes(job)
            ) as span,
        ):
            try:
                async with aclosing(self._generate(live, context)) as responses:
                    async for response in responses:
                        yield response
            finally:
                if live.generation is not None:
                    live.generation.abort()
                self._record(span, live)

    def _check(self, job: DecodeJob) -> None:
        if self._watch.is_stalled:
            raise EngineStalled(self._node_id)
        limits = self._limits
        num_tokens = len(job.token_ids) + job.max_tokens
        if num_tokens > limits.max_request_tokens:
            raise RequestTooLarge(
                f"token_ids and max_tokens: {len(job.token_ids)} + {job.max_tokens} tokens given, the arena of node "
                f"{self._node_id} holds max_request_tokens={limits.max_request_tokens} for one request"
            )
        if self._local is not None and job.prefill_address is None and not self._local.is_fallback:
            raise NoPrefillNode(f"prefill_address: empty, and decode node {self._node_id} computes no prompts itself")
        if job.request_id in self._live:
            raise DuplicateRequest(job.request_id)
        num_waiting = sum(live.is_waiting for live in self._live.values())
        if num_waiting >= limits.max_waiting_requests:
            raise QueueFull(
                f"{num_waiting} requests wait on node {self._node_id}, "
                f"max_waiting_requests={limits.max_waiting_requests}"
            )

    @contextmanager
    def _claim(self, job: DecodeJob, arrived_at_s: float) -> Iterator[_Live]:
        live = self._live[job.request_id] = _Live(job=job, measured=Measured(arrived_at_s=arrived_at_s))
        try:
            yield live
        finally:
            del self._live[job.request_id]

    async def _generate(self, live: _Live, context: RpcContext) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        pulse, interval_s = EnginePulse(self._engine), live.job.progress_interval_s
        starting = asyncio.create_task(self._start(live, context))
        try:
            while not (await asyncio.wait((starting,), timeout=interval_s))[0]:
                if pulse.has_moved():
                    yield progress_to_proto()
        finally:
            # Whatever it has begun is ended before this is.
            starting.cancel()
            await asyncio.wait((starting,))
            if not starting.cancelled():
                # Heard, whether or not anybody is left to be told.
                starting.exception()
        generation = starting.result()
        is_first = True
        async for tokens, ended in generation.batches(at_least_every_s=interval_s):
            if not tokens and ended is None:
                if pulse.has_moved():
                    yield progress_to_proto()
                continue
            if is_first:
                # Admission precedes every token. A caller that cancels gets no finish and still knows what was cached.
                yield admitted_to_proto(
                    DecodeAdmitted(
                        cached=_cached_tokens(live),
                        timings=_timings(live, decode_ms=0.0),
                        output_is_structured=live.job.sampling.form is not None,
                        prompt_logprobs=_prompt_logprobs(live),
                    )
                )
                is_first = False
            if tokens:
                yield tokens_to_proto(tokens)
            if ended is not None:
                yield finish_to_proto(self._finish(live, ended))

    async def _start(self, live: _Live, context: RpcContext) -> Generation:
        """The request with its prompt computed or, on a fused node, queued."""
        matcher = await self._forms.matcher(live.job.sampling.form, live.job.output_token_ids)

        def make_generation() -> Generation:
            live.generation = Generation(
                engine_id=f"{live.job.request_id}#{next(self._serials)}",
                job=live.job,
                engine=self._engine,
                measured=live.measured,
                is_local=live.local_reason is not None,
                # Each attempt begins where the request does.
                matcher=None if matcher is None else matcher.fork(),
            )
            return live.generation

        if self._local is not None:
            live.local_reason = await self._local.reason_for(live.job)
        if self._remote is None or live.job.prefill_address is None or live.local_reason is not None:
            generation = make_generation()
            generation.submit()
            return generation
        try:
            generation, live.received, live.handoff = await self._remote.prefill(
                live.job, live.job.prefill_address, make_generation, context.time_remaining_s()
            )
        except NodeError as error:
            raise _blamed(error, live, live.job.prefill_address) from error
        return generation

    # What the client and the trace are told.

    def _finish(self, live: _Live, ended: GenerationEnded) -> DecodeFinish:
        usage = Usage(
            prompt_tokens=live.job.num_prompt_tokens,
            completion_tokens=live.job.num_output_tokens + live.measured.num_tokens,
            cached=_cached_tokens(live),
        )
        decode_ms = _ms(live.measured.first_token_at_s, live.measured.last_token_at_s)
        return DecodeFinish(
            reason=ended.reason,
            matched_token_id=ended.matched_token_id,
            usage=usage,
            timings=_timings(live, decode_ms=decode_ms),
        )

    def _attributes(self, job: DecodeJob) -> dict[str, str | int]:
        attributes: dict[str, str | int] = {
            span_names.PDMESH_REQUEST_ID: job.request_id,
            span_names.PDMESH_NODE_ID: self._node_id,
            span_names.GEN_AI_REQUEST_MODEL: self._model_name,
            span_names.GEN_AI_REQUEST_MAX_TOKENS: job.max_tokens,
            span_names.GEN_AI_USAGE_INPUT_TOKENS: job.num_prompt_tokens,
        }
        if job.adapter is not None:
            attributes[span_names.PDMESH_ADAPTER] = job.adapter.name
        if job.num_output_tokens:
            attributes[span_names.PDMESH_RESUMED_TOKENS] = job.num_output_tokens
        return attributes

    def _record(self, span: Span, live: _Live) -> None:
        measured = live.measured
        span.set(span_names.GEN_AI_USAGE_OUTPUT_TOKENS, live.job.num_output_tokens + measured.num_tokens)
        span.set(span_names.PDMESH_CACHED_TOKENS_DECODE_DEVICE, measured.device_hit_tokens)
        if measured.num_retractions:
            span.set(span_names.PDMESH_RETRACTIONS, measured.num_retractions)
        if live.received is not None:
            span.set(span_names.PDMESH_CACHED_TOKENS_PREFILL_DEVICE, live.received.cached_tokens)
        queued_at_s = measured.arrived_at_s if live.handoff is None else live.handoff.ready_at_s
        self._phases.record(span, span_names.SPAN_DECODE_QUEUE, queued_at_s, measured.admitted_at_s)
        if live.local_reason is not None:
            span.set(span_names.PDMESH_LOCAL_PREFILL, live.local_reason.value)
        if self._remote is None or live.local_reason is not None:
            self._phases.record(
                span, span_names.SPAN_PREFILL_COMPUTE, measured.admitted_at_s, measured.first_token_at_s
            )
        self._phases.record(span, span_names.SPAN_DECODE_GENERATE, measured.first_token_at_s, measured.last_token_at_s)


def _blamed(error: NodeError, live: _Live, prefill_address: str) -> NodeError:
    """The failure of a handoff as the caller must hear it: whether this node failed or the prefill node did."""
    own = None if live.generation is None else live.generation.failure
    if own is not None:
        return own
    if isinstance(error, DeadlineExceeded | RequestCancelled | NoMemoryInTime):
        return error
    if isinstance(error, PeerDraining):
        return PrefillDraining(error.message, address=prefill_address, node_id=error.node_id)
    blamed = PrefillFailed(status_of(error).name, error.message, address=prefill_address)
    blamed.retry_after_s = error.retry_after_s
    return blamed


def _cached_tokens(live: _Live) -> CachedTokens:
    """Each prompt token counts once: those found on this node first, then those that only the prefill node had.

    Of a request that goes on behind earlier output a hit may reach into that, which is no prompt.
    """
    measured = live.measured
    num_prompt_tokens = live.job.num_prompt_tokens
    device = min(measured.device_hit_tokens, num_prompt_tokens)
    host = min(measured.host_hit_tokens, num_prompt_tokens - device)
    storage = min(measured.storage_hit_tokens, num_prompt_tokens - device - host)
    on_prefill_node = 0 if live.received is None else min(live.received.cached_tokens, num_prompt_tokens)
    return CachedTokens(
        prefill_device=max(0, on_prefill_node - device - host - storage),
        decode_device=device,
        host=host,
        storage=storage,
    )


def _prompt_logprobs(live: _Live) -> tuple[SampledToken, ...]:
    """From whoever computed the prompt; empty where they were not asked for."""
    if live.received is not None:
        return live.received.done.prompt_logprobs
    return () if live.generation is None else live.generation.prompt_logprobs


def _timings(live: _Live, *, decode_ms: float) -> Timings:
    measured = live.measured
    first = measured.first_token_at_s
    time_to_first_token_ms = _ms(measured.arrived_at_s, first)
    if live.received is None:
        return Timings(
            prefill_queue_ms=_ms(measured.arrived_at_s, measured.admitted_at_s),
            prefill_compute_ms=_ms(measured.admitted_at_s, first),
            time_to_first_token_ms=time_to_first_token_ms,
            decode_ms=decode_ms,
        )
    done = live.received.done
    phases: HandoffTimings = done.timings
    return Timings(
        prefill_queue_ms=phases.queue_ms,
        prefill_compute_ms=phases.compute_ms,
        transfer_ms=phases.transfer_ms,
        transfer_exposed_ms=phases.transfer_exposed_ms,
        transferred_bytes=done.transferred_bytes,
        transferred_runs=done.transferred_runs,
        transferred_blocks=done.transferred_blocks,
        time_to_first_token_ms=time_to_first_token_ms,
        decode_ms=decode_ms,
    )


def _ms(begin_s: float | None, end_s: float | None) -> float:
    return 0.0 if begin_s is None or end_s is None else max(0.0, (end_s - begin_s) * 1000.0)
