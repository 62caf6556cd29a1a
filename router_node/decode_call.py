"""One call to one decode node, and two of them side by side.

A call says nothing of what follows from it. A node that knows how to report progress must say something from time to
time; one that does not is taken for hung, whatever its connection looks like. Lives on the router's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing

from pdmesh.v1 import decode_pb2, decode_pb2_grpc

from node_runtime.errors import NodeError, PeerUnavailable, RequestCancelled
from node_runtime.rpc import Channel
from router_node.placement import Occupation, PlacementChoice, Placer

# How often a node must say something, in parts of the time after which its silence ends the call.
_SIGNS_PER_SILENCE = 4
_MIN_INTERVAL_MS = 50
_MS_PER_S = 1000


class DecodeCall:
    """Counts as in flight on its nodes from the moment it is made, so that the next placement sees it. Close it."""

    def __init__(
        self,
        *,
        choice: PlacementChoice,
        request: decode_pb2.DecodeRequest,
        channel: Channel,
        placer: Placer,
        began_at_s: float,
        silence_timeout_s: float | None,
    ) -> None:
        """`silence_timeout_s` None: the deadline alone bounds how long the node may say nothing."""
        self.choice = choice
        self.began_at_s = began_at_s
        self._silence_timeout_s = silence_timeout_s if choice.decode.reports_progress else None
        if self._silence_timeout_s is not None:
            interval_ms = round(self._silence_timeout_s * _MS_PER_S / _SIGNS_PER_SILENCE)
            request.progress_interval_ms = max(_MIN_INTERVAL_MS, interval_ms)
        self._occupying: AbstractContextManager[Occupation] | None = placer.occupied(choice)
        self.occupation = self._occupying.__enter__()
        self._held: list[decode_pb2.DecodeResponse] = []
        self._failure: NodeError | None = None
        self._incoming = self._read(channel, request)

    async def open(self) -> None:
        """Returns once the first token, the end or a failure is known; `events` begin with what has come by then."""
        try:
            async for event in self._incoming:
                self._held.append(event)
                if event.WhichOneof("event") in ("tokens", "finish"):
                    return
        except NodeError as error:
            self._failure = error

    @property
    def failure(self) -> NodeError | None:
        """What `open` met, and `events` will raise."""
        return self._failure

    async def events(self) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """What the node says, signs of life apart. Raises NodeError; PeerUnavailable when it falls silent."""
        for event in self._held:
            yield event
        self._held.clear()
        if self._failure is not None:
            raise self._failure
        async for event in self._incoming:
            yield event

    async def close(self, *, is_answered: bool = False) -> None:
        """Cancels what is left of the call. Idempotent; nobody may be reading.

        `is_answered`: the request is done, so that how long it took is typical of requests.
        """
        await self._incoming.aclose()
        occupying, self._occupying = self._occupying, None
        if occupying is None:
            return
        if is_answered:
            occupying.__exit__(None, None, None)
        else:
            given_up = RequestCancelled("the call was given up")
            occupying.__exit__(RequestCancelled, given_up, None)

    async def _read(
        self, channel: Channel, request: decode_pb2.DecodeRequest
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        stub = channel.stub(decode_pb2_grpc.DecodeStub)
        async with aclosing(channel.server_stream(stub.Generate, request)) as events:
            while True:
                try:
                    async with asyncio.timeout(self._silence_timeout_s):
                        event = await anext(events, None)
                except TimeoutError:
                    reason = f"the node gave no sign of life for {self._silence_timeout_s:g} s"
                    raise PeerUnavailable(channel.address, reason) from None
                if event is None:
                    return
                if not event.HasField("progress"):
                    yield event


async def first_to_answer(
    first: DecodeCall,
    *,
    after_s: float,
    make_second: Callable[[], DecodeCall | None],
    on_failure: Callable[[DecodeCall], None],
) -> DecodeCall:
    """`first`, or the call that `make_second` makes when `first` has not answered within `after_s`.

    Whichever answers first is returned, open; the other one is closed before. One that fails while the other may yet
    answer is told to `on_failure` and closed; when both fail the last one is returned, whose events raise.
    """
    runners = {asyncio.create_task(first.open()): first}
    try:
        if not (await asyncio.wait(runners, timeout=after_s))[0]:
            second = make_second()
            if second is not None:
                runners[asyncio.create_task(second.open())] = second
        return await _winner_of(runners, on_failure)
    finally:
        for task in runners:
            task.cancel()
        if runners:
            await asyncio.wait(runners)
        for call in runners.values():
            await call.close()


async def _winner_of(
    runners: dict[asyncio.Task[None], DecodeCall], on_failure: Callable[[DecodeCall], None]
) -> DecodeCall:
    """The first that has answered, taken out of `runners`."""
    while True:
        done = (await asyncio.wait(runners, return_when=asyncio.FIRST_COMPLETED))[0]
        # The first call first, should both have answered.
        for task in [task for task in runners if task in done]:
            call = runners.pop(task)
            task.result()
            if call.failure is None or not runners:
                return call
            on_failure(call)
            await call.close()
