"""A node that passes every call on to a real one, but for those to which it answers what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeAlias

import grpc

Lie: TypeAlias = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]


class LyingNode(grpc.GenericRpcHandler):
    """`async with LyingNode(behind, lies) as node`."""

    def __init__(self, behind: str, lies: Mapping[str, Lie]) -> None:
        """`behind`: address of the real node. `lies`: by path of the method, what is answered instead."""
        self._behind = behind
        self._lies = lies

    async def __aenter__(self) -> LyingNode:
        self._channel = grpc.aio.insecure_channel(self._behind)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Any method can be served as one that streams both ways: on the wire they are the same."""
        path = handler_call_details.method

        async def answer(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            answers = self._lies[path](requests) if path in self._lies else self._passed_on(path, requests, context)
            async for response in answers:
                await context.write(response)

        return grpc.stream_stream_rpc_method_handler(answer)

    async def _passed_on(
        self, path: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        try:
            call = self._channel.stream_stream(path)(requests, timeout=context.time_remaining())
        except grpc.aio.UsageError:
            # The test is over.
            return
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
        finally:
            call.cancel()


async def next_or_silence(messages: AsyncIterator[bytes], silence_s: float) -> bytes | None:
    """The next message; None when there is none for a while, or no more."""
    try:
        return await asyncio.wait_for(anext(messages, None), silence_s)
    except TimeoutError:
        return None
