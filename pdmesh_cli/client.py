"""Python client of the router: `PdmeshClient` for plain code, `AsyncPdmeshClient` for asyncio.

Streams typed events and turns every failure into a PdmeshError. Knows the public API only. A client owns its channel;
close it or use it as a context manager.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Self, TypeVar

from pdmesh.v1 import inference_pb2, inference_pb2_grpc

from node_runtime.errors import NodeError, PeerUnavailable
from node_runtime.rpc.channel import Channel
from node_runtime.rpc.errors import CANNOT_CONNECT, status_of
from pdmesh_cli.client_types import (
    Completion,
    Delta,
    Event,
    Finish,
    GenerateOptions,
    ModelCard,
    PdmeshError,
    Placement,
    Prompt,
    PromptLogprobs,
    Token,
    event_of,
    request_message,
)
from pdmesh_cli.identity import ANONYMOUS, Identity

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_MAX_RETRIES = 3
_CONNECTION_LOST = ("Stream removed", "Socket closed", "Connection reset", "recvmsg", "keepalive", "ping timeout")
_RETRY_SPREAD = 1.5
_DEFAULT_OPTIONS = GenerateOptions()

T = TypeVar("T")


@contextmanager
def client_errors() -> Iterator[None]:
    """Turns what the block raises for a call into PdmeshError."""
    try:
        yield
    except PeerUnavailable as error:
        raise _pdmesh_error(error, _unavailable(error)) from None
    except NodeError as error:
        raise _pdmesh_error(error, error.message) from None


def _pdmesh_error(error: NodeError, message: str) -> PdmeshError:
    return PdmeshError(status_of(error).name, message, retry_after_s=error.retry_after_s)


def _unavailable(error: PeerUnavailable) -> str:
    """Tells a router that cannot be dialled from one that passes on what befell its nodes."""
    if error.reason.startswith(CANNOT_CONNECT):
        return f"cannot connect to {error.address}: {_why_not_connected(error.reason.removeprefix(CANNOT_CONNECT))}"
    if error.reason.startswith(_CONNECTION_LOST):
        return f"the connection to {error.address} was lost: {error.reason}"
    return error.reason


def _why_not_connected(cause: str) -> str:
    """gRPC says of some mistakes what its parser met, and of a handshake that failed with whoever speaks no TLS: OK."""
    if "Trying to connect an http1.x server" in cause:
        return "an HTTP server answers there, no gRPC server"
    if cause == "OK" or "handshake" in cause.lower():
        return "the TLS handshake failed"
    return cause


class AsyncPdmeshClient:
    """A client for one event loop, the one that is running when it is made."""

    def __init__(self, router: str, *, max_retries: int = DEFAULT_MAX_RETRIES, identity: Identity = ANONYMOUS) -> None:
        """`router` is host:port; nothing is dialled yet. Raises PdmeshError for a malformed address.

        `identity` is the token and the certificate to show, and the authority to trust. A request that a busy
        mesh refuses is sent again after the time that it names, `max_retries` times at most.
        """
        self._max_retries = max_retries
        with client_errors():
            self._channel: Channel = identity.connect(router)
        self._stub = self._channel.stub(inference_pb2_grpc.InferenceStub)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self, prompt: Prompt, options: GenerateOptions = _DEFAULT_OPTIONS, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncGenerator[Event, None]:
        """Streams one Placement, then PromptLogprobs if asked for, then Deltas, then exactly one Finish; of several
        samples each its own, in any order.

        `timeout_s` is the deadline of the whole answer, waits for a busy mesh included; a request that was refused
        after its Placement and sent again has another Placement. Raises PdmeshError. Leaving the iteration early
        cancels the work on every node; wrap it in `contextlib.aclosing` to do that at once.
        """
        request = request_message(prompt, options)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        for num_retries in itertools.count():
            has_begun = False
            try:
                async with aclosing(self._stream(request, deadline_s - loop.time())) as events:
                    async for event in events:
                        has_begun = has_begun or not isinstance(event, Placement)
                        yield event
                return
            except PdmeshError as error:
                delay_s = _retry_delay_s(error, num_retries)
                is_last = num_retries >= self._max_retries
                if has_begun or is_last or delay_s is None or loop.time() + delay_s >= deadline_s:
                    raise
            await asyncio.sleep(delay_s)

    async def _stream(self, request: inference_pb2.GenerateRequest, timeout_s: float) -> AsyncGenerator[Event, None]:
        """The events of one call. Raises PdmeshError."""
        num_open = request.num_samples or 1
        with client_errors():
            responses = self._channel.server_stream(self._stub.Generate, request, timeout_s=timeout_s)
            async with aclosing(responses) as stream:
                async for response in stream:
                    event = event_of(response)
                    num_open -= isinstance(event, Finish)
                    yield event
        if num_open:
            raise PdmeshError("INTERNAL", "the stream ended without a Finish")

    async def complete(
        self, prompt: Prompt, options: GenerateOptions = _DEFAULT_OPTIONS, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Completion:
        """The whole answer at once. Raises PdmeshError, and ValueError where several are asked for."""
        if options.num_samples not in (None, 1):
            raise ValueError(f"num_samples: {options.num_samples} given, only complete_all gives several")
        return (await self.complete_all(prompt, options, timeout_s=timeout_s))[0]

    async def complete_all(
        self, prompt: Prompt, options: GenerateOptions = _DEFAULT_OPTIONS, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[Completion, ...]:
        """All samples at once, in their order. Raises PdmeshError."""
        collected = [_Collected() for _ in range(options.num_samples or 1)]
        async with aclosing(self.generate(prompt, options, timeout_s=timeout_s)) as events:
            async for event in events:
                if event.index >= len(collected):
                    raise PdmeshError("INTERNAL", f"the server sent sample {event.index} of {len(collected)}")
                collected[event.index].take(event)
        return tuple(sample.completion() for sample in collected)

    async def list_models(self, *, timeout_s: float = 10.0) -> tuple[ModelCard, ...]:
        """The models that are served. Raises PdmeshError."""
        with client_errors():
            response = await self._channel.unary(
                self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout_s=timeout_s
            )
        return tuple(
            ModelCard(
                name=card.name,
                context_tokens=card.context_tokens,
                vocab_size=card.vocab_size,
                parent=card.parent,
            )
            for card in response.models
        )

    async def close(self) -> None:
        """Cancels what still runs. Idempotent."""
        await self._channel.close()


def _retry_delay_s(error: PdmeshError, num_retries: int) -> float | None:
    """At least what the server asks for, longer each time, and spread so that clients refused together part."""
    if error.retry_after_s is None:
        return None
    return error.retry_after_s * 2.0**num_retries * random.uniform(1.0, _RETRY_SPREAD)


class _Collected:
    """Puts the events of one sample together."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._tokens: list[Token] = []
        self._prompt_tokens: tuple[Token, ...] = ()
        self._placement: Placement | None = None
        self._finish: Finish | None = None

    def take(self, event: Event) -> None:
        match event:
            case Placement():
                self._placement = event
            case PromptLogprobs():
                self._prompt_tokens = event.tokens
            case Delta():
                self._text.append(event.text)
                self._tokens.extend(event.tokens)
            case Finish():
                self._finish = event

    def completion(self) -> Completion:
        if self._placement is None or self._finish is None:
            raise PdmeshError("INTERNAL", "the stream ended without a Placement and a Finish")
        return Completion(
            text="".join(self._text),
            tokens=tuple(self._tokens),
            placement=self._placement,
            finish=self._finish,
            prompt_tokens=self._prompt_tokens,
        )


class GenerateStream:
    """The events of one answer as a plain iterator. `close` (or leaving the `with` block) cancels the work."""

    def __init__(self, client: PdmeshClient, events: AsyncGenerator[Event, None]) -> None:
        self._client = client
        self._events = events
        self._is_closed = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._is_closed:
            raise StopIteration
        try:
            event = self._client._wait(_next_or_none(self._events))
        except BaseException:
            self.close()
            raise
        if event is None:
            self._is_closed = True
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is left. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._client._wait(_close(self._events))


async def _next_or_none(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)


async def _close(events: AsyncGenerator[Event, None]) -> None:
    await events.aclose()


class PdmeshClient:
    """A client for code without an event loop: blocks, may be shared by threads, works inside notebooks.

    Its calls run on an event loop in a thread of its own.
    """

    def __init__(self, router: str, *, max_retries: int = DEFAULT_MAX_RETRIES, identity: Identity = ANONYMOUS) -> None:
        """Like `AsyncPdmeshClient`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdmesh-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._wait(_connected(router, max_retries, identity))
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self, prompt: Prompt, options: GenerateOptions = _DEFAULT_OPTIONS, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> GenerateStream:
        """Like `AsyncPdmeshClient.generate`."""
        return GenerateStream(self, self._client.generate(prompt, options, timeout_s=timeout_s))

    def complete(
        self, prompt: Prompt, options: GenerateOptions = _DEFAULT_OPTIONS, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Completion:
        """Like `AsyncPdmeshClient.complete`."""
        return self._wait(self._client.complete(prompt, options, timeout_s=timeout_s))

    def complete_all(
        self, prompt: Prompt, options: GenerateOptions = _DEFAULT_OPTIONS, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[Completion, ...]:
        """Like `AsyncPdmeshClient.complete_all`."""
        return self._wait(self._client.complete_all(prompt, options, timeout_s=timeout_s))

    def list_models(self, *, timeout_s: float = 10.0) -> tuple[ModelCard, ...]:
        """Like `AsyncPdmeshClient.list_models`."""
        return self._wait(self._client.list_models(timeout_s=timeout_s))

    def close(self) -> None:
        """Cancels what still runs and ends the thread. Idempotent."""
        if not self._loop.is_closed():
            self._wait(self._client.close())
            self._stop_loop()

    def _wait(self, work: Coroutine[object, object, T]) -> T:
        """Runs a coroutine on the client's loop; an interrupt of the waiting thread cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _connected(router: str, max_retries: int, identity: Identity) -> AsyncPdmeshClient:
    return AsyncPdmeshClient(router, max_retries=max_retries, identity=identity)
