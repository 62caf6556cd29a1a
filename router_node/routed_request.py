"""One request from its first placement to its last message, on as many nodes as it takes.

Places, calls the decode node, passes on what it sends, and places anew when a node failed. It decides nothing itself:
`placement` says where, `retry` whether and when, `answer` what the client gets. Lives on the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from pdmesh.v1 import decode_pb2, inference_pb2

from model_runtime.text.tokenizer import Tokenizer
from node_runtime.adapters import isolation_keys
from node_runtime.clock import Clock
from node_runtime.errors import NodeError, RemoteError, RequestTooLarge
from node_runtime.rpc import ChannelPool, Span, Telemetry, span_names, status_of
from router_node.answer import Answer
from router_node.decode_call import DecodeCall, first_to_answer
from router_node.discovery import Discovery
from router_node.failures import AttemptFailure, FailureKind, failure_of, nowhere_to_go
from router_node.hedging import Hedges
from router_node.node_pool import NodePool
from router_node.placement import PENALTY_REFUSED, NoUsableNode, PlacementChoice, Placer
from router_node.prompt_prefixes import PromptPrefixes
from router_node.request_preparation import PreparedRequest
from router_node.request_trace import RequestTrace
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
    hedges: Hedges
    # How long a decode node that reports progress may say nothing; None: until the deadline.
    silence_timeout_s: float | None


class RoutedRequest:
    """Iterate over `responses` once."""

    def __init__(
        self,
        parts: RoutingParts,
        prepared: PreparedRequest,
        span: Span,
        *,
        deadline_s: float,
        near: PlacementChoice | None = None,
    ) -> None:
        """`deadline_s` is on the clock of `parts`; `span` is that of the whole request.

        `near` is where it is to begin, for its prompt is cached there; a request that brings it is not hedged.
        """
        self._parts = parts
        self._prepared = prepared
        message = prepared.message
        # A prompt whose log-probabilities are wanted finds nothing cached.
        finds_nothing = message.HasField("num_prompt_logprobs")
        keys = isolation_keys(message.extra_keys, prepared.adapter)
        self._prefixes = None if finds_nothing else PromptPrefixes(message.token_ids, keys)
        self._trace = RequestTrace(parts.telemetry, parts.clock, span)
        self._answer = Answer(prepared, parts.tokenizer)
        self._near = near
        self._call: DecodeCall
        self._began_at_s = 0.0
        self._retries = RequestRetries(
            policy=parts.retry_policy, budget=parts.retry_budget, deadline_s=deadline_s, draw=parts.draw
        )

    @property
    def choice(self) -> PlacementChoice:
        """Where the request runs; meaningful once it has been placed."""
        return self._call.choice

    async def responses(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """One placement, then deltas, then one finish. Raises NodeError."""
        self._call = self._begin(self._place(self._near))
        self._began_at_s = self._call.began_at_s
        try:
            yield self._placement_response(self._call.choice)
            while True:
                try:
                    async with aclosing(self._attempt()) as responses:
                        async for response in responses:
                            yield response
                    break
                except NodeError as error:
                    if self._answer.is_complete:
                        # It died with the last token sent: only its report is lost.
                        break
                    failure = await self._failed(self._call, error)
                self._call = self._begin(await self._next_choice(failure))
            await self._call.close(is_answered=True)
        finally:
            await self._call.close()
        rest = self._answer.rest()
        if rest:
            yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=rest))
        yield inference_pb2.GenerateResponse(finish=self._answer.finish())

    def _begin(self, choice: PlacementChoice, *, is_hedge: bool = False) -> DecodeCall:
        """A call that is counted in flight; nothing is sent yet."""
        parts, now_s = self._parts, self._parts.clock.now_s()
        request = self._answer.request("" if choice.prefill is None else choice.prefill.address)
        if is_hedge:
            self._answer.begin_hedge()
        else:
            self._answer.begin_attempt()
        return DecodeCall(
            choice=choice,
            request=request,
            channel=parts.channels.get(choice.decode.address),
            placer=parts.placer,
            began_at_s=now_s,
            silence_timeout_s=parts.silence_timeout_s,
        )

    async def _attempt(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """What the client may see of one attempt, which ends with the answer. Raises NodeError."""
        answer, clock = self._answer, self._parts.clock
        if answer.num_attempts == 1 and self._near is None:
            self._call = await self._hedged(self._call)
        occupation, num_resumed_tokens = self._call.occupation, answer.num_tokens
        async with aclosing(self._call.events()) as events:
            async for event in events:
                match event.WhichOneof("event"):
                    case "admitted":
                        prompt = self._take_admitted(event.admitted)
                        occupation.end_prefill(
                            prompt_tokens=self._prepared.prompt_tokens + num_resumed_tokens,
                            cached=event.admitted.cached,
                            timings=event.admitted.timings,
                        )
                        if prompt is not None:
                            yield inference_pb2.GenerateResponse(prompt_logprobs=prompt)
                    case "tokens":
                        occupation.end_prefill()
                        if not answer.num_tokens and not self._retries.num_failures:
                            self._parts.hedges.note_first_token(clock.now_s() - self._began_at_s)
                        delta = self._take_tokens(event.tokens, clock.now_s())
                        yield inference_pb2.GenerateResponse(delta=delta)
                    case "finish":
                        answer.take_finish(event.finish)
                if answer.matched_stop is not None:
                    return
        if not answer.is_complete:
            raise RemoteError("INTERNAL", "the stream ended without a finish")

    async def _failed(self, call: DecodeCall, error: NodeError) -> AttemptFailure:
        """Ends a call that failed and says what that means."""
        await call.close()
        return self._judged(call, error)

    def _judged(self, call: DecodeCall, error: NodeError) -> AttemptFailure:
        answer = self._answer
        # A name that the router made up may clash with a client's; the next attempt has another one.
        is_own_name = answer.num_attempts == 1 and self._prepared.sample == 0
        failure = failure_of(error, call.choice, is_first=is_own_name)
        self._trace.record_failed(call, failure, attempt=answer.num_attempts, resumed_tokens=answer.num_tokens)
        return failure

    # Hedging.

    async def _hedged(self, first: DecodeCall) -> DecodeCall:
        """`first`, or a second call that was made beside it because it was slow, and was the sooner to give a token."""
        after_s = self._parts.hedges.delay_s()
        if after_s is None:
            return first
        second: DecodeCall | None = None

        def make_second() -> DecodeCall | None:
            nonlocal second
            second = self._second(first)
            return second

        winner = await first_to_answer(
            first, after_s=after_s, make_second=make_second, on_failure=self._note_failed_runner
        )
        if second is not None:
            self._tell_hedge(winner, second)
        return winner

    def _second(self, first: DecodeCall) -> DecodeCall | None:
        """None where no other nodes are left or the budget is empty.

        It shares no node with the first one: what holds that up cannot hold this one up too, and what it finds cached
        was not computed for this request.
        """
        avoided = {**self._retries.penalties, **dict.fromkeys(first.choice.addresses, PENALTY_REFUSED)}
        try:
            choice = self._choose(avoided)
        except (NoUsableNode, RequestTooLarge):
            return None
        if any(address in avoided for address in choice.addresses) or not self._parts.hedges.try_begin():
            return None
        _log.info("no token yet from %s; asked beside it: %s", first.choice, choice)
        return self._begin(choice, is_hedge=True)

    def _tell_hedge(self, winner: DecodeCall, second: DecodeCall) -> None:
        outcome = "lost" if second.failure is None else "failed"
        if winner is second and second.failure is None:
            outcome = "won"
            self._parts.hedges.note_won()
            self._trace.tell_choice(second.choice)
        self._trace.record_hedge(second, attempt=self._answer.num_attempts, outcome=outcome)

    def _note_failed_runner(self, call: DecodeCall) -> None:
        """One of two failed, and the other one may yet answer."""
        if call.failure is not None:
            self._note_failure(self._judged(call, call.failure))

    def _take_admitted(self, admitted: decode_pb2.DecodeAdmitted) -> inference_pb2.PromptLogprobs | None:
        try:
            return self._answer.take_admitted(admitted)
        except ValueError as error:
            # A decode node of an older release: another one may know what this one was asked for.
            raise RemoteError("FAILED_PRECONDITION", str(error)) from None

    def _take_tokens(self, tokens: decode_pb2.DecodeTokens, now_s: float) -> inference_pb2.Delta:
        try:
            return self._answer.take_tokens(tokens.tokens, now_s)
        except ValueError as error:
            raise RemoteError("INTERNAL", str(error)) from None

    # Placing.

    def _choose(self, penalties: Mapping[str, int]) -> PlacementChoice:
        """For what is left of the request. Raises NoUsableNode or RequestTooLarge."""
        answer = self._answer
        return self._parts.placer.choose(
            prompt_tokens=self._prepared.prompt_tokens + answer.num_tokens,
            max_tokens=answer.max_tokens_left,
            penalties=penalties,
            prefixes=self._prefixes,
            adapter=self._prepared.adapter,
        )

    def _place(self, wanted: PlacementChoice | None = None) -> PlacementChoice:
        """The choice, `wanted` where there is one, told to the trace and the log."""
        with self._parts.telemetry.span(span_names.SPAN_PLACE) as span:
            try:
                choice = wanted or self._choose(self._retries.penalties)
                if wanted is None:
                    span.set_all(choice.explanation())
            except NoUsableNode:
                self._parts.discovery.wake()
                raise
        self._trace.tell_choice(choice)
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
            level = logging.INFO if failure.kind is FailureKind.DRAINING else logging.WARNING
            _log.log(level, "%s; placed anew in %.0f ms", failure.error.message, delay_s * 1000)
            await asyncio.sleep(delay_s)
            try:
                return self._place()
            except NoUsableNode as error:
                failure = nowhere_to_go(error, after=failure)
            except RequestTooLarge:
                raise self._final(failure) from None

    def _next_addresses(self, failure: AttemptFailure) -> tuple[str, ...]:
        try:
            return self._choose(self._retries.penalties).addresses
        except NoUsableNode:
            return ()
        except RequestTooLarge:
            # What was generated made the prompt too long for every prefill node that is left.
            raise self._final(failure) from None

    def _note_failure(self, failure: AttemptFailure) -> None:
        self._retries.record(failure)
        if failure.kind is FailureKind.DRAINING:
            self._parts.pool.record_draining(failure.culprit)
            self._parts.discovery.wake()
        if failure.kind is FailureKind.BROKEN:
            if failure.culprit:
                # Until it answers again, other requests prefer other nodes as well.
                self._parts.pool.distrust((failure.culprit,))
            self._parts.discovery.wake()

    def _final(self, failure: AttemptFailure) -> NodeError:
        """What the client hears when no attempt follows."""
        num_failures = self._retries.num_failures
        if num_failures <= 1:
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
                trace_id=self._trace.trace_id,
            )
        )
