"""The HTTP endpoints, as an ASGI application.

A request for text runs as a call of the router's own server: same deadline rules, trace, drain and service object as
over gRPC. The status of an answer is decided when its first text, or its failure, is known, so that a refusal by a
node is an HTTP status even of a stream. A client that leaves cancels its call. Lives on the router's event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, cast

from pdmesh.v1 import inference_pb2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from model_runtime.text.tokenizer import Tokenizer
from node_runtime.clock import Clock
from node_runtime.errors import NodeError, RequestCancelled, UnknownModel
from node_runtime.request_rules import check_request_id
from node_runtime.rpc import Credentials, RpcContext
from router_node.openai_api.answers import (
    AnswerHead,
    AnswerShape,
    ChatAnswer,
    CompletionAnswer,
    JsonObject,
    Sample,
)
from router_node.openai_api.bodies import ChatBody, CompletionBody, GenerationBody, parse_body
from router_node.openai_api.body_reading import BodyReader
from router_node.openai_api.failures import BadBody, HttpFailure, failure_for
from router_node.service import InferenceService

DEADLINE_HEADER: Final = "x-pdmesh-timeout-ms"
REQUEST_ID_HEADER: Final = "x-request-id"
TRACE_ID_HEADER: Final = "x-pdmesh-trace-id"
_NS_PER_S: Final = 1_000_000_000
_MAX_TIMEOUT_MS: Final = 86_400_000
_JSON_TYPE: Final = "application/json"
# How long the failure of a call may take to be written.
_FAREWELL_S: Final = 1.0

_log = logging.getLogger("pdmesh.http")

ResultT = TypeVar("ResultT")


class CallRunner(Protocol):
    """Runs calls under the rules of a node; `RpcServer` is one."""

    @property
    def is_draining(self) -> bool: ...

    async def run_call(
        self,
        body: Callable[[RpcContext], Awaitable[ResultT]],
        *,
        method: str,
        peer: str,
        limit_s: float | None,
        metadata: Sequence[tuple[str, str | bytes]],
        credentials: Credentials,
    ) -> ResultT: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """What the caller of a request shows: a token, as clients of the API call a key."""

    authorization: str
    certificate_names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiParts:
    """What the endpoints need, made by the composition root. `is_ready`: whether a request could be served now."""

    calls: CallRunner
    inference: InferenceService
    tokenizer: Tokenizer
    clock: Clock
    model_name: str
    bodies: BodyReader
    is_ready: Callable[[], bool]


def make_app(parts: ApiParts, pages: Sequence[BaseRoute] = ()) -> Starlette:
    """The application with all its endpoints, and what else the router serves."""
    questions = _Questions(parts)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", _Generation(parts, ChatBody, ChatAnswer), methods=["POST"]),
            Route("/v1/completions", _Generation(parts, CompletionBody, CompletionAnswer), methods=["POST"]),
            Route("/v1/models", questions.list_all, methods=["GET"]),
            Route("/v1/models/{name:path}", questions.show_one, methods=["GET"]),
            Route("/health", questions.health, methods=["GET"]),
            *pages,
        ],
        exception_handlers={HTTPException: _refuse_unknown_path, Exception: _report_defect},
    )
    # A redirect would be an empty answer to most clients, and name the scheme and host that a proxy has hidden.
    app.router.redirect_slashes = False
    return app


async def _refuse_unknown_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: f"{request.url.path}: no such path", 405: f"{request.method}: not allowed for {request.url.path}"}
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    failure = HttpFailure(status=status, message=words.get(status, str(error)), kind="invalid_request_error")
    return JSONResponse(failure.body(), status_code=status, headers=headers)


async def _report_defect(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    failure = HttpFailure(status=500, message="internal error; the router's log has the details", kind="server_error")
    return JSONResponse(failure.body(), status_code=500)


class _Questions:
    """The endpoints that generate nothing."""

    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts
        self._created_s = _unix_s(parts.clock)

    async def list_all(self, request: Request) -> Response:
        return await self._answer(request, "")

    async def show_one(self, request: Request) -> Response:
        return await self._answer(request, str(request.path_params["name"]))

    async def _answer(self, request: Request, name: str) -> Response:
        """The model of that name, or the list of all; refused to those who may not know."""

        async def look(context: RpcContext) -> JsonObject:
            listed = await self._parts.inference.ListModels(inference_pb2.ListModelsRequest(), context)
            cards = [self._card(model) for model in listed.models]
            if not name:
                return {"object": "list", "data": cards}
            for card in cards:
                if card["id"] == name:
                    return card
            served = ", ".join(f'"{card["id"]}"' for card in cards)
            raise UnknownModel(
                f'model: "{name}" is not served here, only {served} {"is" if len(cards) == 1 else "are"}'
            )

        try:
            return JSONResponse(await _run(self._parts.calls, request, "ListModels", look))
        except NodeError as error:
            failure = failure_for(error, {})
            return JSONResponse(failure.body(), status_code=failure.status, headers=failure.headers())

    async def health(self, request: Request) -> Response:
        is_serving = self._parts.is_ready() and not self._parts.calls.is_draining
        return JSONResponse(
            {"status": "serving" if is_serving else "not serving"}, status_code=200 if is_serving else 503
        )

    def _card(self, model: inference_pb2.ModelCard) -> JsonObject:
        parent = {"parent": model.parent} if model.parent else {}
        return {
            **parent,
            "id": model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "pdmesh",
            "max_model_len": model.context_tokens,
        }


class _Generation:
    """The endpoint of one way to ask for text: an ASGI application."""

    def __init__(self, parts: ApiParts, body_kind: type[GenerationBody], shape: type[AnswerShape]) -> None:
        self._parts = parts
        self._body_kind = body_kind
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        reply = _Reply(send, self._body_kind.field_names)
        try:
            await _run(
                self._parts.calls,
                request,
                "Generate",
                lambda context: self._serve(request, receive, reply, context),
            )
        except NodeError as error:
            # A client that does not read was what made the call late: it is not waited for again.
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await reply.fail(failure_for(error, reply.field_names))

    async def _serve(self, request: Request, receive: Receive, reply: _Reply, context: RpcContext) -> None:
        content = await self._parts.bodies.read(request)
        async with _cancelled_when_gone(receive, reply):
            request_id = request.headers.get(REQUEST_ID_HEADER, "")
            check_request_id(request_id, allow_empty=True)
            request_id = request_id or uuid.uuid4().hex
            reply.add_header(REQUEST_ID_HEADER, request_id)
            body = parse_body(self._body_kind, content)
            # An answer may take long, and many may run.
            del content
            reply.field_names = body.own_field_names()
            asked = body.to_request(request_id)
            head = AnswerHead(
                request_id=request_id,
                model=asked.model or self._parts.model_name,
                created_s=_unix_s(self._parts.clock),
                with_logprobs=body.num_logprobs is not None,
                with_usage_in_stream=body.wants_usage_in_stream,
                echo=body.echo_text(self._parts.tokenizer),
                call_rules=body.call_rules(),
            )
            shape = self._shape(head, self._parts.tokenizer)
            async with aclosing(self._parts.inference.Generate(asked, context)) as responses:
                if body.is_streamed:
                    await _send_stream(responses, shape, reply)
                else:
                    await _send_whole(responses, shape, reply)


async def _run(
    calls: CallRunner, request: Request, method: str, body: Callable[[RpcContext], Awaitable[ResultT]]
) -> ResultT:
    """As a call of that method of the Inference service. Raises NodeError."""
    return await calls.run_call(
        body,
        method=f"/pdmesh.v1.Inference/{method}",
        peer="" if request.client is None else f"{request.client.host}:{request.client.port}",
        limit_s=_asked_limit_s(request.headers.get(DEADLINE_HEADER)),
        metadata=[(name.lower(), value) for name, value in request.headers.items()],
        credentials=ShownToken(authorization=request.headers.get("authorization", "")),
    )


async def _send_whole(
    responses: AsyncIterator[inference_pb2.GenerateResponse], shape: AnswerShape, reply: _Reply
) -> None:
    samples: defaultdict[int, Sample] = defaultdict(Sample)
    async for response in responses:
        match response.WhichOneof("event"):
            case "placement":
                reply.add_header(TRACE_ID_HEADER, response.placement.trace_id)
            case "prompt_logprobs":
                shape.take_prompt_logprobs(response.prompt_logprobs.tokens)
            case "delta":
                samples[response.index].deltas.append(response.delta)
            case "finish":
                samples[response.index].finish = response.finish
    await reply.send_object(shape.whole(samples))


async def _send_stream(
    responses: AsyncIterator[inference_pb2.GenerateResponse], shape: AnswerShape, reply: _Reply
) -> None:
    """Nothing is sent before the first delta: until then a failure can still have a status of its own."""
    opened: set[int] = set()
    finishes: list[inference_pb2.Finish] = []
    async for response in responses:
        index = response.index
        match response.WhichOneof("event"):
            case "placement":
                reply.add_header(TRACE_ID_HEADER, response.placement.trace_id)
                continue
            case "prompt_logprobs":
                shape.take_prompt_logprobs(response.prompt_logprobs.tokens)
                continue
        chunks = [] if index in opened else list(shape.opening(index))
        opened.add(index)
        if response.HasField("finish"):
            chunks += shape.closing(index, response.finish)
            finishes.append(response.finish)
        elif (chunk := shape.chunk(index, response.delta)) is not None:
            chunks.append(chunk)
        await reply.send_events(chunks)
    await reply.send_events(shape.usage(finishes), is_last=True)


class _Reply:
    """What goes back to one client. Until `has_begun` a failure becomes a status, after it the end of the stream."""

    def __init__(self, send: Send, field_names: Mapping[str, str]) -> None:
        """`field_names` says how the client calls the fields that a failure names."""
        self._send = send
        self.field_names = field_names
        self._headers: dict[str, str] = {}
        self.has_begun = False
        self.is_complete = False

    def add_header(self, name: str, value: str) -> None:
        """Without effect once the answer has begun; an empty value is none. `value` is printable."""
        if value:
            self._headers[name] = value

    async def send_object(self, content: JsonObject) -> None:
        await self._send_json(200, _encoded(content))

    async def send_events(self, chunks: Sequence[JsonObject], *, is_last: bool = False) -> None:
        if not self.has_begun:
            await self._begin(200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"})
        events = b"".join(b"data: " + _encoded(chunk) + b"\n\n" for chunk in chunks)
        await self._write(events + (b"data: [DONE]\n\n" if is_last else b""), is_last=is_last)

    async def fail(self, failure: HttpFailure) -> None:
        """After the beginning of a stream clients read the failure in an event, and miss its `[DONE]`."""
        if self.has_begun:
            await self._write(b"data: " + failure.encoded() + b"\n\n", is_last=True)
            return
        await self._send_json(failure.status, failure.encoded(), failure.headers())

    async def _send_json(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        await self._begin(status, _JSON_TYPE, {"content-length": str(len(content)), **(headers or {})})
        await self._write(content, is_last=True)

    async def _begin(self, status: int, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        self.has_begun = True
        fields = {"content-type": content_type, **self._headers, **(headers or {})}
        # Header values are bytes; what is not Latin-1 travels as UTF-8.
        raw = [(name.encode("ascii"), value.encode()) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, content: bytes, *, is_last: bool) -> None:
        self.is_complete = is_last
        if content or is_last:
            await self._send({"type": "http.response.body", "body": content, "more_body": not is_last})


@asynccontextmanager
async def _cancelled_when_gone(receive: Receive, reply: _Reply) -> AsyncIterator[None]:
    """Cancels the block when the client leaves before its reply is complete; then raises RequestCancelled. The body has
    been read.
    """
    task = cast("asyncio.Task[object]", asyncio.current_task())
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            continue
        # A server says the same when the reply is complete.
        if not reply.is_complete:
            is_gone = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise RequestCancelled("the client left") from None
        raise
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


def _asked_limit_s(header: str | None) -> float | None:
    if header is None:
        return None
    if not re.fullmatch(r"[0-9]{1,8}", header) or not 1 <= int(header) <= _MAX_TIMEOUT_MS:
        raise BadBody(
            f"{DEADLINE_HEADER}: {header!r} given, milliseconds in [1, {_MAX_TIMEOUT_MS}] required",
            param=DEADLINE_HEADER,
        )
    return int(header) / 1000


def _unix_s(clock: Clock) -> int:
    return clock.unix_ns_at(clock.now_s()) // _NS_PER_S


def _encoded(content: JsonObject) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
