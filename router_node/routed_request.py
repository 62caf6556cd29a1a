"""One request from its first placement to its last message, on as many nodes as it takes.

Places, calls the decode node, passes on what it sends, and places anew when a node failed. It decides nothing itself:
`placement` says where, `retry` whether and when, `answer` what the client gets. Lives on the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from pdmesh.v1 import decode_pb2, decode_pb2_grpc, inference_pb2

from model_runtime.text.tokenizer import Tokenizer
from node_runtime.clock import Clock
from node_runtime.errors import NodeError, RemoteError, RequestTooLarge
from node_runtime.rpc import ChannelPool, Span, Telemetry, span_names, status_of
from router_node.answer import Answer
from router_node.discovery import Discovery
from router_node.failures import AttemptFailure, FailureKind, failure_of, nowhere_to_go
from router_node.node_pool import NodePool
from router_node.placement import NoUsableNode, Occupation, PlacementChoice, Placer
from router_node.prompt_prefixes import PromptPrefixes
from router_node.request_preparation import PreparedRequest
from router_node.retry import RequestRetries, RetryBudget, RetryPolicy

_log = logging.getLogger("pdmesh.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingParts:
    """What every request is routed with, made by the composition root. `draw` gives random numbers in [0, 1)."""

    tokenizer: Tokenizer
    pool: NodePool
    placer: Placer
    discovery: Discovery
    channels: ChannelPool
    telemetry: Telemetry
    clock: Clock
    retry_policy: RetryPolicy
    retry_budget: RetryBudget
    draw: Callable[[], float]


class RoutedRequest:
    """Iterate over `responses` once."""

    def __init__(self, parts: RoutingParts, prepared: PreparedRequest, span: Span, *, deadline_s: float) -> None:
        """`deadline_s` is on the clock of `parts`; `span` is that of the whole request."""
        self._parts = parts
        self._prepared = prepared
        self._span = span
        self._prefixes = PromptPrefixes(prepared.message.token_ids, prepared.message.extra_keys)
        self._answer = Answer(prepared, parts.tokenizer)
        self._retries = RequestRetries(
            policy=parts.retry_policy, budget=parts.retry_budget, deadline_s=deadline_s, draw=parts.draw
        )

    async def responses(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """One placement, then deltas, then one finish. Raises NodeError."""
        choice = self._place()
        while True:
            began_at_s = self._parts.clock.now_s()
            try:
                # Counted before anything is awaited, so that the next request to be placed sees it.
                with self._parts.placer.occupied(choice) as occupation:
                    if self._answer.num_attempts == 0:
                        yield self._placement_response(choice)
                    async with aclosing(self._attempt(choice, occupation, began_at_s)) as deltas:
                        async for delta in deltas:
                            yield inference_pb2.GenerateResponse(delta=delta)
                break
            except NodeError as error:
                if self._answer.is_complete:
                    # It died with the last token sent: only its report is lost.
                    break
                failure = failure_of(error, choice, is_first=self._answer.num_attempts == 1)
                self._record_attempt(choice, failure, began_at_s)
                choice = await self._next_choice(failure)
        rest = self._answer.rest()
        if rest:
            yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=rest))
        yield inference_pb2.GenerateResponse(finish=self._answer.finish())

    async def _attempt(
        self, choice: PlacementChoice, occupation: Occupation, began_at_s: float
    ) -> AsyncGenerator[inference_pb2.Delta, None]:
        """What the client may see of one attempt, which ends with the answer. Raises NodeError."""
        answer, clock = self._answer, self._parts.clock
        channel = self._parts.channels.get(choice.decode.address)
        stub = channel.stub(decode_pb2_grpc.DecodeStub)
        request = answer.request("" if choice.prefill is None else choice.prefill.address)
        answer.begin_attempt(began_at_s)
        # Leaving this block cancels the call to the decode node, as a matched stop string does.
        async with aclosing(channel.server_stream(stub.Generate, request)) as events:
            async for event in events:
                match event.WhichOneof("event"):
                    case "admitted":
                        self._take_admitted(event.admitted)
                        occupation.end_prefill(
                            prompt_tokens=len(request.token_ids),
                            cached=event.admitted.cached,
                            timings=event.admitted.timings,
                        )
                    case "tokens":
                        occupation.end_prefill()
                        yield self._take_tokens(event.tokens, clock.now_s())
                    case "finish":
                        answer.take_finish(event.finish)
                if answer.matched_stop is not None:
                    return
        if not answer.is_complete:
            raise RemoteError("INTERNAL", "the stream ended without a finish")

    def _take_admitted(self, admitted: decode_pb2.DecodeAdmitted) -> None:
        try:
            self._answer.take_admitted(admitted)
        except ValueError as error:
            raise RemoteError("FAILED_PRECONDITION", str(error)) from None

    def _take_tokens(self, tokens: decode_pb2.DecodeTokens, now_s: float) -> inference_pb2.Delta:
        try:
            return self._answer.take_tokens(tokens.tokens, now_s)
        except ValueError as error:
            raise RemoteError("INTERNAL", str(error)) from None

    # Placing.

    def _choose(self) -> PlacementChoice:
        """For what is left of the request. Raises NoUsableNode or RequestTooLarge."""
        answer = self._answer
        return self._parts.placer.choose(
            prompt_tokens=self._prepared.prompt_tokens + answer.num_tokens,
            max_tokens=answer.max_tokens_left,
            penalties=self._retries.penalties,
            prefixes=self._prefixes,
        )

    def _place(self) -> PlacementChoice:
        """The choice, told to the trace and the log."""
        with self._parts.telemetry.span(span_names.SPAN_PLACE) as span:
            try:
                choice = self._choose()
                span.set_all(choice.explanation())
            except NoUsableNode:
                self._parts.discovery.wake()
                raise
        self._span.set(span_names.PDMESH_DECODE_NODE, choice.decode.node_id)
        self._span.set(span_names.PDMESH_PREFILL_NODE, "" if choice.prefill is None else choice.prefill.node_id)
        num_tokens = self._answer.num_tokens
        behind = f" and {num_tokens} generated before" if num_tokens else ""
        _log.info("%d prompt tokens%s go to %s", self._prepared.prompt_tokens, behind, choice)
        return choice

    async def _next_choice(self, failure: AttemptFailure) -> PlacementChoice:
        """Where the request goes on after `failure`, when its time has come. Raises what the client must hear."""
        while True:
            self._note_failure(failure)
            delay_s = self._retries.decide(self._next_addresses(failure), self._parts.clock.now_s())
            if delay_s is None:
                raise self._final(failure)
            _log.warning("%s; placed anew in %.0f ms", failure.error.message, delay_s * 1000)
            await asyncio.sleep(delay_s)
            try:
                return self._place()
            except NoUsableNode as error:
                failure = nowhere_to_go(error, after=failure)
            except RequestTooLarge:
                raise self._final(failure) from None

    def _next_addresses(self, failure: AttemptFailure) -> tuple[str, ...]:
        try:
            return self._choose().addresses
        except NoUsableNode:
            return ()
        except RequestTooLarge:
            # What was generated made the prompt too long for every prefill node that is left.
            raise self._final(failure) from None

    def _note_failure(self, failure: AttemptFailure) -> None:
        self._retries.record(failure)
        if failure.kind is FailureKind.BROKEN:
            if failure.culprit:
                # Until it answers again, other requests prefer other nodes as well.
                self._parts.pool.distrust((failure.culprit,))
            self._parts.discovery.wake()

    def _final(self, failure: AttemptFailure) -> NodeError:
        """What the client hears when no attempt follows."""
        num_failures = self._retries.num_failures
        if num_failures == 1:
            return failure.error
        error = RemoteError(status_of(failure.error).name, f"{failure.error.message} (attempt {num_failures})")
        error.retry_after_s = failure.error.retry_after_s
        return error

    # What client and trace are told.

    def _placement_response(self, choice: PlacementChoice) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(
            placement=inference_pb2.Placement(
                request_id=self._prepared.message.request_id,
                decode_node=choice.decode.node_id,
                prefill_node="" if choice.prefill is None else choice.prefill.node_id,
                trace_id=self._span.trace_id,
            )
        )

    def _record_attempt(self, choice: PlacementChoice, failure: AttemptFailure, began_at_s: float) -> None:
        """A span of its own, because the node that died cannot tell its part of the story."""
        clock = self._parts.clock
        self._parts.telemetry.record_span(
            span_names.SPAN_FAILED_ATTEMPT,
            clock.unix_ns_at(began_at_s),
            clock.unix_ns_at(clock.now_s()),
            self._span.context,
            {
                span_names.PDMESH_ATTEMPT: self._answer.num_attempts,
                span_names.PDMESH_DECODE_NODE: choice.decode.node_id,
                span_names.PDMESH_PREFILL_NODE: "" if choice.prefill is None else choice.prefill.node_id,
                span_names.PDMESH_RESUMED_TOKENS: self._answer.num_tokens,
                span_names.ERROR_TYPE: status_of(failure.error).name,
            },
        )
