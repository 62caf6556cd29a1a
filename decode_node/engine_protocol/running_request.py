"""One request of a gateway while it runs: its samples begun, merged and ended together. Lives on the event loop.

The first sample goes ahead: the others begin once it has a token, so that they find the prompt in the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from pdmesh.v1 import decode_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2

from decode_node.engine_protocol.answers import SampleAnswer
from decode_node.engine_protocol.requests import EngineRequest, in_its_words
from model_runtime.text.tokenizer import Tokenizer
from node_runtime.errors import InvalidRequest, RequestCancelled

Generate = Callable[[decode_pb2.DecodeRequest], AsyncGenerator[decode_pb2.DecodeResponse, None]]
_Item = tokenspeed_scheduler_pb2.GenerateResponse | Exception


class RunningRequest:
    """Iterate over `responses` once."""

    def __init__(self, request: EngineRequest, generate: Generate, tokenizer: Tokenizer) -> None:
        """`generate` makes the answer of one sample."""
        self._request = request
        self._generate = generate
        self._answers = [SampleAnswer(request, index, tokenizer) for index in range(len(request.samples))]
        self._first_has_begun = asyncio.Event()
        # One place: a gateway that reads slowly holds all samples up, and not the memory of this node.
        self._items: asyncio.Queue[_Item] = asyncio.Queue(maxsize=1)
        self._tasks: list[asyncio.Task[None]] = []

    async def responses(self) -> AsyncGenerator[tokenspeed_scheduler_pb2.GenerateResponse, None]:
        """Of each sample its chunks, where they are wanted, then one complete answer. Raises NodeError, and ends all
        samples, when one of them fails.
        """
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(len(self._answers))]
        num_open = len(self._tasks)
        try:
            while num_open:
                item = await self._items.get()
                if isinstance(item, Exception):
                    raise item
                num_open -= item.HasField("complete")
                yield item
        finally:
            await self._end()

    async def abort(self, reason: str) -> None:
        """Ends the request, whose answer fails with RequestCancelled. Nothing of it runs any more when this returns."""
        for task in self._tasks:
            task.cancel()
        while not self._items.empty():
            self._items.get_nowait()
        self._items.put_nowait(RequestCancelled(f"request {self._request.request_id} was aborted: {reason}"))
        await self._end()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, index: int) -> None:
        try:
            await self._stream(index)
        except InvalidRequest as error:
            await self._items.put(in_its_words(error))
        except Exception as error:
            await self._items.put(error)

    async def _stream(self, index: int) -> None:
        if index:
            await self._first_has_begun.wait()
        answer, finish = self._answers[index], None
        async with aclosing(self._generate(self._request.samples[index])) as responses:
            async for response in responses:
                if response.HasField("admitted") and not index:
                    self._note_cached(response.admitted)
                elif response.HasField("tokens"):
                    chunk = answer.push(response.tokens.tokens)
                    self._first_has_begun.set()
                    if self._request.is_streamed:
                        await self._items.put(chunk)
                    if answer.matched_stop is not None:
                        break
                elif response.HasField("finish"):
                    finish = response.finish
        await self._items.put(answer.complete(finish))

    def _note_cached(self, admitted: decode_pb2.DecodeAdmitted) -> None:
        """The prompt is one, and was found as the first sample found it."""
        cached = admitted.cached
        for answer in self._answers:
            answer.num_cached_tokens = cached.prefill_device + cached.decode_device + cached.host + cached.storage
