"""The Inference service: text in, text out.

Ties the parts of the router together for one request after another and owns none of them. Raises NodeError for every
refusal; the RPC layer makes statuses of them, applies the deadline and cancels the handler when the client leaves,
which cancels the call to the decode node.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from pdmesh.v1 import inference_pb2

from node_runtime.adapters import AdapterId
from node_runtime.errors import UnknownModel
from node_runtime.log_context import bound_request_id
from node_runtime.request_rules import check_request_id
from node_runtime.rpc import RpcContext, Span, SpanKind, span_names
from node_runtime.rpc.telemetry import AttributeValue
from router_node.live_requests import LiveRequests
from router_node.placement import NoUsableNode
from router_node.request_metrics import RequestMetrics
from router_node.request_preparation import PreparedRequest, RequestPreparer, num_samples_of, samples_of
from router_node.routed_request import RoutedRequest, RoutingParts
from router_node.samples import SampledRequest
from router_node.tenants import Tenants

_FINISH_REASON_NAMES: Mapping[int, str] = MappingProxyType(
    {
        inference_pb2.FINISH_REASON_STOP: "stop",
        inference_pb2.FINISH_REASON_LENGTH: "length",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """What the service needs, made by the composition root."""

    model_name: str
    preparer: RequestPreparer
    live: LiveRequests
    routing: RoutingParts
    metrics: RequestMetrics
    tenants: Tenants | None = None


class InferenceService:
    """Servicer of pdmesh.v1.Inference."""

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: RpcContext
    ) -> inference_pb2.ListModelsResponse:
        routing = self._parts.routing
        limits, context_tokens = routing.pool.limits(), routing.tokenizer.max_context_tokens
        base = inference_pb2.ModelCard(
            name=self._parts.model_name,
            context_tokens=context_tokens if limits is None else min(context_tokens, limits.tokens),
            vocab_size=routing.tokenizer.vocab_size,
        )
        return inference_pb2.ListModelsResponse(
            models=[base, *(_adapter_card(name, base) for name in sorted(routing.pool.adapters()))]
        )

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: RpcContext
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        parts = self._parts
        operation = _operation(request)
        with (
            parts.routing.telemetry.span(f"{operation} {parts.model_name}", kind=SpanKind.SERVER) as span,
            parts.metrics.measuring(operation, span) as measured,
        ):
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
            num_samples = num_samples_of(request)
            tenant = context.caller().tenant
            with (
                parts.live.holding(request_id, num_samples),
                self._using(tenant, num_samples, span),
                bound_request_id(request_id),
            ):
                prepared = await self._prepare(request, request_id, span, tenant)
                deadline_s = parts.routing.clock.now_s() + context.time_remaining_s()
                finishes: list[inference_pb2.Finish] = []
                async with aclosing(self._responses(prepared, num_samples, span, deadline_s)) as responses:
                    async for response in responses:
                        measured.take(response)
                        if response.HasField("finish"):
                            response.finish.timings.time_to_first_token_ms = measured.first_token_ms(response.index)
                            finishes.append(response.finish)
                            _record_finishes(span, finishes)
                        yield response

    @contextmanager
    def _using(self, tenant: str, num_samples: int, span: Span) -> Iterator[None]:
        """One request of `tenant` runs inside the block. Raises QueueFull."""
        if self._parts.tenants is None:
            yield
            return
        span.set(span_names.PDMESH_TENANT, tenant)
        with self._parts.tenants.using(tenant, num_samples):
            yield

    def _responses(
        self, prepared: PreparedRequest, num_samples: int, span: Span, deadline_s: float
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        routing = self._parts.routing
        if num_samples == 1:
            return RoutedRequest(routing, prepared, span, deadline_s=deadline_s).responses()
        samples = samples_of(prepared, num_samples)
        return SampledRequest(routing, samples, span, deadline_s=deadline_s).responses()

    def _find_adapter(self, request: inference_pb2.GenerateRequest, span: Span) -> AdapterId | None:
        """What the request names, told to the trace. Raises UnknownModel, InvalidRequest, or NoUsableNode where nobody
        can say yet what is served.
        """
        preparer, pool = self._parts.preparer, self._parts.routing.pool
        try:
            adapter = preparer.find_adapter(request, pool.adapters())
        except UnknownModel:
            if not pool.is_ready:
                raise NoUsableNode(pool.describe_lack()) from None
            raise
        if adapter is not None:
            span.set(span_names.PDMESH_ADAPTER, adapter.name)
        return adapter

    async def _prepare(
        self, request: inference_pb2.GenerateRequest, request_id: str, span: Span, tenant: str
    ) -> PreparedRequest:
        preparer, pool = self._parts.preparer, self._parts.routing.pool
        adapter = self._find_adapter(request, span)
        preparer.check(request)
        await preparer.check_form(request)
        with self._parts.routing.telemetry.span(span_names.SPAN_TOKENIZE):
            token_ids = await preparer.tokenize(request)
        prepared = preparer.prepare(request, request_id, token_ids, pool.limits(), tenant=tenant, adapter=adapter)
        span.set_all(_facts_of(prepared))
        span.set(span_names.GEN_AI_RESPONSE_ID, request_id)
        span.set(span_names.GEN_AI_RESPONSE_MODEL, self._parts.model_name if adapter is None else adapter.name)
        return prepared


def _adapter_card(name: str, base: inference_pb2.ModelCard) -> inference_pb2.ModelCard:
    return inference_pb2.ModelCard(
        name=name, context_tokens=base.context_tokens, vocab_size=base.vocab_size, parent=base.name
    )


def _operation(request: inference_pb2.GenerateRequest) -> str:
    is_chat = request.WhichOneof("prompt") == "chat"
    return span_names.OPERATION_CHAT if is_chat else span_names.OPERATION_TEXT_COMPLETION


def _facts_of(prepared: PreparedRequest) -> dict[str, AttributeValue]:
    """What a request asks for, by the names of the semantic conventions; what it leaves open is left out, and what it
    quotes, too.
    """
    sampling = prepared.message.sampling
    facts: dict[str, AttributeValue] = {
        span_names.GEN_AI_REQUEST_MAX_TOKENS: prepared.message.max_tokens,
        span_names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        # Attributes are signed 64-bit numbers, seeds are not.
        span_names.GEN_AI_REQUEST_SEED: str(sampling.seed),
        span_names.GEN_AI_USAGE_INPUT_TOKENS: prepared.prompt_tokens,
    }
    if sampling.HasField("top_k"):
        facts[span_names.GEN_AI_REQUEST_TOP_K] = sampling.top_k
    if sampling.HasField("top_p"):
        facts[span_names.GEN_AI_REQUEST_TOP_P] = sampling.top_p
    return facts


def _record_finishes(span: Span, finishes: Sequence[inference_pb2.Finish]) -> None:
    """What the samples that have ended by now used, together."""
    usages = [finish.usage for finish in finishes]
    span.set_all(
        {
            span_names.GEN_AI_USAGE_INPUT_TOKENS: sum(usage.prompt_tokens for usage in usages),
            span_names.GEN_AI_USAGE_OUTPUT_TOKENS: sum(usage.completion_tokens for usage in usages),
            span_names.GEN_AI_RESPONSE_FINISH_REASONS: tuple(
                _FINISH_REASON_NAMES.get(finish.reason, "unspecified") for finish in finishes
            ),
        }
    )
    num_replacements = sum(finish.num_replacements for finish in finishes)
    if num_replacements:
        span.set(span_names.PDMESH_ATTEMPT, num_replacements + 1)
    if any(usage.HasField("cached") for usage in usages):
        by_source = {
            span_names.PDMESH_CACHED_TOKENS_PREFILL_DEVICE: sum(usage.cached.prefill_device for usage in usages),
            span_names.PDMESH_CACHED_TOKENS_DECODE_DEVICE: sum(usage.cached.decode_device for usage in usages),
            span_names.PDMESH_CACHED_TOKENS_HOST: sum(usage.cached.host for usage in usages),
            span_names.PDMESH_CACHED_TOKENS_STORAGE: sum(usage.cached.storage for usage in usages),
        }
        span.set_all({**by_source, span_names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: sum(by_source.values())})
