"""The Inference service: text in, text out.

Ties the parts of the router together for one request after another and owns none of them. Raises NodeError for every
refusal; the RPC layer makes statuses of them, applies the deadline and cancels the handler when the client leaves,
which cancels the call to the decode node.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType

from pdmesh.v1 import decode_pb2, decode_pb2_grpc, inference_pb2

from model_runtime.text.tokenizer import Tokenizer
from node_runtime.clock import Clock
from node_runtime.errors import PeerUnavailable, RemoteError
from node_runtime.log_context import bound_request_id
from node_runtime.request_rules import check_request_id
from node_runtime.rpc import ChannelPool, RpcContext, Span, SpanKind, Telemetry, span_names
from router_node.discovery import Discovery
from router_node.live_requests import LiveRequests
from router_node.node_pool import NodePool
from router_node.placement import NoUsableNode, PlacementChoice, Placer
from router_node.request_preparation import PreparedRequest, RequestPreparer
from router_node.text_stream import TextStream

_MS_PER_S = 1000.0
_FINISH_REASON_NAMES: Mapping[int, str] = MappingProxyType(
    {
        inference_pb2.FINISH_REASON_STOP: "stop",
        inference_pb2.FINISH_REASON_LENGTH: "length",
    }
)

_log = logging.getLogger("pdmesh.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """What the service needs, made by the composition root."""

    model_name: str
    tokenizer: Tokenizer
    preparer: RequestPreparer
    pool: NodePool
    placer: Placer
    discovery: Discovery
    live: LiveRequests
    channels: ChannelPool
    telemetry: Telemetry
    clock: Clock


class InferenceService:
    """Servicer of pdmesh.v1.Inference."""

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: RpcContext
    ) -> inference_pb2.ListModelsResponse:
        limits, context_tokens = self._parts.pool.limits(), self._parts.tokenizer.max_context_tokens
        card = inference_pb2.ModelCard(
            name=self._parts.model_name,
            context_tokens=context_tokens if limits is None else min(context_tokens, limits.context_tokens),
            vocab_size=self._parts.tokenizer.vocab_size,
        )
        return inference_pb2.ListModelsResponse(models=[card])

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: RpcContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        parts = self._parts
        operation = _operation(request)
        with parts.telemetry.span(f"{operation} {parts.model_name}", kind=SpanKind.SERVER) as span:
            check_request_id(request.request_id, allow_empty=True)
            request_id = request.request_id or uuid.uuid4().hex
            span.set_all(
                {
                    span_names.GEN_AI_OPERATION_NAME: operation,
                    span_names.GEN_AI_PROVIDER_NAME: span_names.PROVIDER_PDMESH,
                    span_names.GEN_AI_REQUEST_MODEL: request.model or parts.model_name,
                    span_names.PDMESH_REQUEST_ID: request_id,
                }
            )
            with parts.live.holding(request_id), bound_request_id(request_id):
                prepared = await self._prepare(request, request_id, span)
                choice = self._place(prepared, span)
                with parts.placer.occupied(choice):
                    yield _placement_response(request_id, choice, span)
                    async with aclosing(self._generate(prepared, choice, span)) as responses:
                        async for response in responses:
                            yield response

    async def _prepare(self, request: inference_pb2.GenerateRequest, request_id: str, span: Span) -> PreparedRequest:
        preparer = self._parts.preparer
        preparer.check(request)
        with self._parts.telemetry.span(span_names.SPAN_TOKENIZE):
            token_ids = await preparer.tokenize(request)
        prepared = preparer.prepare(request, request_id, token_ids, self._parts.pool.limits())
        sampling = prepared.message.sampling
        span.set_all(
            {
                span_names.GEN_AI_REQUEST_MAX_TOKENS: prepared.message.max_tokens,
                span_names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
                # Attributes are signed 64-bit numbers, seeds are not.
                span_names.GEN_AI_REQUEST_SEED: str(sampling.seed),
                span_names.GEN_AI_USAGE_INPUT_TOKENS: prepared.prompt_tokens,
            }
        )
        return prepared

    def _place(self, prepared: PreparedRequest, span: Span) -> PlacementChoice:
        with self._parts.telemetry.span(span_names.SPAN_PLACE):
            try:
                choice = self._parts.placer.choose(
                    prompt_tokens=prepared.prompt_tokens, max_tokens=prepared.message.max_tokens
                )
            except NoUsableNode:
                self._parts.discovery.wake()
                raise
        span.set(span_names.PDMESH_DECODE_NODE, choice.decode.node_id)
        if choice.prefill is not None:
            span.set(span_names.PDMESH_PREFILL_NODE, choice.prefill.node_id)
        _log.info("%d prompt tokens go to %s", prepared.prompt_tokens, choice)
        return choice

    async def _generate(
        self, prepared: PreparedRequest, choice: PlacementChoice, span: Span
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Deltas, then one Finish."""
        parts = self._parts
        text = TextStream(parts.tokenizer, stop=prepared.stop, stop_token_ids=prepared.message.stop_token_ids)
        meter = _Meter(parts.clock)
        admitted: decode_pb2.DecodeAdmitted | None = None
        reported: decode_pb2.DecodeFinish | None = None
        # Leaving this block cancels the call to the decode node, as a matched stop string does.
        async with aclosing(self._decode(prepared, choice)) as events:
            async for event in events:
                match event.WhichOneof("event"):
                    case "admitted":
                        admitted = event.admitted
                    case "tokens":
                        delta = _push(text, event.tokens, choice)
                        meter.saw_tokens()
                        yield inference_pb2.GenerateResponse(delta=delta)
                    case "finish":
                        reported = event.finish
                if text.matched_stop is not None:
                    break
        if text.matched_stop is None:
            if reported is None:
                raise RemoteError("INTERNAL", f"{choice}: the stream ended without a finish")
            rest = text.finish()
            if rest:
                yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=rest))
        finish = _finish_of(reported) if reported is not None else _own_finish(prepared, text, admitted, meter)
        if text.matched_stop is not None:
            finish.reason = inference_pb2.FINISH_REASON_STOP
            finish.matched_stop = text.matched_stop
        _record_finish(span, finish)
        yield inference_pb2.GenerateResponse(finish=finish)

    async def _decode(
        self, prepared: PreparedRequest, choice: PlacementChoice
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """The decode node's events. Raises NodeError that names the nodes of the placement."""
        channel = self._parts.channels.get(choice.decode.address)
        stub = channel.stub(decode_pb2_grpc.DecodeStub)
        request = prepared.addressed("" if choice.prefill is None else choice.prefill.address).message
        try:
            async with aclosing(channel.server_stream(stub.Generate, request)) as events:
                async for event in events:
                    yield event
        except PeerUnavailable as error:
            # The status does not tell which of the two failed, so both have to answer before they are trusted again.
            self._parts.pool.distrust(choice.addresses)
            self._parts.discovery.wake()
            raise RemoteError("UNAVAILABLE", f"{choice}: {error.reason}") from error
        except RemoteError as error:
            raise RemoteError(error.code_name, f"{choice}: {error.message}") from error


class _Meter:
    """When tokens came, for a request whose decode node cannot tell because it was cancelled."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first_s: float | None = None
        self._last_s = 0.0

    def saw_tokens(self) -> None:
        self._last_s = self._clock.now_s()
        if self._first_s is None:
            self._first_s = self._last_s

    @property
    def decode_ms(self) -> float:
        """From the first tokens to the last."""
        return 0.0 if self._first_s is None else (self._last_s - self._first_s) * _MS_PER_S


def _operation(request: inference_pb2.GenerateRequest) -> str:
    is_chat = request.WhichOneof("prompt") == "chat"
    return span_names.OPERATION_CHAT if is_chat else span_names.OPERATION_TEXT_COMPLETION


def _placement_response(request_id: str, choice: PlacementChoice, span: Span) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        placement=inference_pb2.Placement(
            request_id=request_id,
            decode_node=choice.decode.node_id,
            prefill_node="" if choice.prefill is None else choice.prefill.node_id,
            trace_id=span.trace_id,
        )
    )


def _push(text: TextStream, tokens: decode_pb2.DecodeTokens, choice: PlacementChoice) -> inference_pb2.Delta:
    try:
        return text.push(tokens.tokens)
    except ValueError as error:
        raise RemoteError("INTERNAL", f"{choice}: {error}") from None


def _finish_of(message: decode_pb2.DecodeFinish) -> inference_pb2.Finish:
    finish = inference_pb2.Finish(reason=message.reason, usage=message.usage, timings=message.timings)
    if message.HasField("matched_token_id"):
        finish.matched_token_id = message.matched_token_id
    return finish


def _own_finish(
    prepared: PreparedRequest, text: TextStream, admitted: decode_pb2.DecodeAdmitted | None, meter: _Meter
) -> inference_pb2.Finish:
    """The finish of a request whose decode node was cancelled and so sends none.

    Its tokens are those that passed through here. Without an admission (a decode node of an older release) `cached`
    stays absent because it is not known.
    """
    usage = inference_pb2.Usage(prompt_tokens=prepared.prompt_tokens, completion_tokens=text.num_tokens)
    timings = inference_pb2.Timings()
    if admitted is not None:
        usage.cached.CopyFrom(admitted.cached)
        timings.CopyFrom(admitted.timings)
    timings.decode_ms = meter.decode_ms
    return inference_pb2.Finish(usage=usage, timings=timings)


def _record_finish(span: Span, finish: inference_pb2.Finish) -> None:
    span.set_all(
        {
            span_names.GEN_AI_USAGE_INPUT_TOKENS: finish.usage.prompt_tokens,
            span_names.GEN_AI_USAGE_OUTPUT_TOKENS: finish.usage.completion_tokens,
            span_names.GEN_AI_RESPONSE_FINISH_REASONS: (_FINISH_REASON_NAMES.get(finish.reason, "unspecified"),),
        }
    )
    if finish.usage.HasField("cached"):
        cached = finish.usage.cached
        span.set_all(
            {
                span_names.PDMESH_CACHED_TOKENS_PREFILL_DEVICE: cached.prefill_device,
                span_names.PDMESH_CACHED_TOKENS_DECODE_DEVICE: cached.decode_device,
                span_names.PDMESH_CACHED_TOKENS_HOST: cached.host,
                span_names.PDMESH_CACHED_TOKENS_STORAGE: cached.storage,
            }
        )
