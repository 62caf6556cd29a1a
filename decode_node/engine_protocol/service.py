"""Servicer of tokenspeed.grpc.scheduler.TokenSpeedScheduler: the calls of a gateway, on a node of ours.

Deadlines, cancellation, access and drain are those of the server around it; validation, queue and computation are those
of the Decode service below it. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

from smg_grpc_proto.generated import common_pb2, tokenspeed_scheduler_pb2

from decode_node.engine_protocol.descriptions import NodeDescription
from decode_node.engine_protocol.kv_feed import KvFeed
from decode_node.engine_protocol.kv_messages import batch_to_proto, repeat_of
from decode_node.engine_protocol.load_records import LoadRecords
from decode_node.engine_protocol.requests import RequestLimits, request_from_proto
from decode_node.engine_protocol.running_request import RunningRequest
from decode_node.engine_protocol.served_model import ServedModel
from decode_node.engine_protocol.whole_engine import WholeEngine
from node_runtime.clock import Clock
from node_runtime.errors import DuplicateRequest, InvalidRequest
from node_runtime.log_context import bound_request_id
from node_runtime.rpc import RpcContext

_POLL_S: Final = 0.05
_FLUSH_POLL_S: Final = 0.05
# A stream of events ends by itself before its deadline would fail it; gateways begin the next one where it ended.
_FAREWELL_S: Final = 1.0


class EngineProtocolService:
    """One per node."""

    def __init__(
        self,
        *,
        engine: WholeEngine,
        limits: RequestLimits,
        model: ServedModel,
        description: NodeDescription,
        kv_feed: KvFeed,
        clear_cache: Callable[[], Awaitable[bool]],
        why_unhealthy: Callable[[], str],
        clock: Clock,
    ) -> None:
        """`why_unhealthy` is empty while the node serves."""
        self._engine = engine
        self._limits = limits
        self._model = model
        self._description = description
        self._kv_feed = kv_feed
        self._clear_cache = clear_cache
        self._why_unhealthy = why_unhealthy
        self._clock = clock
        self._running: dict[str, RunningRequest] = {}

    async def Generate(
        self, request: tokenspeed_scheduler_pb2.GenerateRequest, context: RpcContext
    ) -> AsyncGenerator[tokenspeed_scheduler_pb2.GenerateResponse, None]:
        asked = request_from_proto(request, self._limits)
        if asked.request_id in self._running:
            raise DuplicateRequest(asked.request_id)
        running = RunningRequest(asked, lambda sample: self._engine.generate(sample, context), self._model.tokenizer)
        self._running[asked.request_id] = running
        try:
            with bound_request_id(asked.request_id):
                async with aclosing(running.responses()) as responses:
                    async for response in responses:
                        if response.HasField("complete") and response.complete.index == 0:
                            self._count_hits(response.complete)
                        yield response
        finally:
            del self._running[asked.request_id]

    async def HealthCheck(
        self, request: tokenspeed_scheduler_pb2.HealthCheckRequest, context: RpcContext
    ) -> tokenspeed_scheduler_pb2.HealthCheckResponse:
        reason = self._why_unhealthy()
        return tokenspeed_scheduler_pb2.HealthCheckResponse(healthy=not reason, message=reason or "serving")

    async def Abort(
        self, request: tokenspeed_scheduler_pb2.AbortRequest, context: RpcContext
    ) -> tokenspeed_scheduler_pb2.AbortResponse:
        running = self._running.get(request.request_id)
        if running is None:
            return tokenspeed_scheduler_pb2.AbortResponse(
                success=False, message=f"no request {request.request_id!r} runs on this node"
            )
        await running.abort(request.reason or "no reason given")
        return tokenspeed_scheduler_pb2.AbortResponse(success=True, message="aborted")

    async def GetModelInfo(
        self, request: tokenspeed_scheduler_pb2.GetModelInfoRequest, context: RpcContext
    ) -> tokenspeed_scheduler_pb2.GetModelInfoResponse:
        return self._description.model_info()

    async def GetServerInfo(
        self, request: tokenspeed_scheduler_pb2.GetServerInfoRequest, context: RpcContext
    ) -> tokenspeed_scheduler_pb2.GetServerInfoResponse:
        return self._description.server_info(now_unix_s=self._unix_s())

    async def GetLoads(
        self, request: tokenspeed_scheduler_pb2.GetLoadsRequest, context: RpcContext
    ) -> tokenspeed_scheduler_pb2.GetLoadsResponse:
        return self._description.loads(request, now_unix_s=self._unix_s())

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: RpcContext
    ) -> common_pb2.FlushCacheResponse:
        """Tries for `timeout_s`: a cache is cleared only while nothing uses it."""
        if not (math.isfinite(request.timeout_s) and request.timeout_s >= 0):
            raise InvalidRequest(f"timeout_s: {request.timeout_s:g} given, a finite number >= 0 required")
        until_s = self._clock.now_s() + request.timeout_s
        while not await self._clear_cache():
            if self._clock.now_s() >= until_s:
                return common_pb2.FlushCacheResponse(success=False, message="requests or transfers are live")
            await asyncio.sleep(_FLUSH_POLL_S)
        return common_pb2.FlushCacheResponse(success=True, message="the cache is empty")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: RpcContext
    ) -> common_pb2.ProfileResponse:
        return _no_profiler()

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: RpcContext
    ) -> common_pb2.ProfileResponse:
        return _no_profiler()

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: RpcContext
    ) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        for data, is_last in self._model.archive_parts():
            yield common_pb2.GetTokenizerChunk(data=data, sha256=self._model.archive_sha256 if is_last else "")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: RpcContext
    ) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """Something at once, so that the subscriber knows that it is heard; then what is new."""
        sequence, records, load = request.start_sequence_number, LoadRecords(), self._description.load
        batches = self._kv_feed.batches_resumed_from(sequence)
        while context.time_remaining_s() > _FAREWELL_S:
            for batch in batches:
                sequence = batch.sequence
                yield records.stamp(batch_to_proto(batch), load(), self._clock.now_s())
            if records.is_due(load(), self._clock.now_s()):
                yield records.stamp(repeat_of(sequence, self._unix_s()), load(), self._clock.now_s())
            await asyncio.sleep(_POLL_S)
            batches = self._kv_feed.batches_since(sequence)

    def _count_hits(self, complete: tokenspeed_scheduler_pb2.GenerateComplete) -> None:
        hits = self._description.hits
        hits.num_prompt_tokens += complete.prompt_tokens
        hits.num_cached_tokens += complete.cached_tokens

    def _unix_s(self) -> float:
        return self._clock.unix_ns_at(self._clock.now_s()) / 1e9


def _no_profiler() -> common_pb2.ProfileResponse:
    return common_pb2.ProfileResponse(success=False, message="this engine has no profiler; it sends traces over OTLP")
