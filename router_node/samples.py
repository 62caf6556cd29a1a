"""Several samples of one request as one stream.

Each sample is a routed request of its own, with its own name, seed and handoff; here they are begun, merged and ended
together. The first one goes ahead: the others begin on its nodes once it has a token, so that they find the prompt in
their caches and compute next to nothing of it. Lives on the router's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pdmesh.v1 import inference_pb2

from node_runtime.rpc import Span, span_names
from router_node.request_preparation import PreparedRequest
from router_node.routed_request import RoutedRequest, RoutingParts

_Item = inference_pb2.GenerateResponse | Exception


class SampledRequest:
    """Iterate over `responses` once."""

    def __init__(
        self, parts: RoutingParts, samples: Sequence[PreparedRequest], span: Span, *, deadline_s: float
    ) -> None:
        """`deadline_s` is on the clock of `parts`; `span` is that of the whole request."""
        self._parts = parts
        self._samples = tuple(samples)
        self._span = span
        self._deadline_s = deadline_s
        self._first: RoutedRequest | None = None
        self._first_has_begun = asyncio.Event()
        # One place: a client that reads slowly holds all samples up, and not the router's memory.
        self._items: asyncio.Queue[_Item] = asyncio.Queue(maxsize=1)

    async def responses(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Per sample one placement, then deltas, then one finish, all with its index. Raises NodeError, and ends all
        samples, when one of them fails.
        """
        tasks = [asyncio.create_task(self._run(index)) for index in range(len(self._samples))]
        num_open = len(tasks)
        try:
            while num_open:
                item = await self._items.get()
                if isinstance(item, Exception):
                    raise item
                num_open -= item.HasField("finish")
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _run(self, index: int) -> None:
        try:
            await self._stream(index)
        except Exception as error:
            await self._items.put(error)

    async def _stream(self, index: int) -> None:
        if index:
            await self._first_has_begun.wait()
        attributes = {span_names.PDMESH_SAMPLE: index}
        with self._parts.telemetry.span(span_names.SPAN_SAMPLE, attributes, parent=self._span.context) as span:
            near = None if self._first is None else self._first.choice
            routed = RoutedRequest(self._parts, self._samples[index], span, deadline_s=self._deadline_s, near=near)
            if not index:
                self._first = routed
            async with aclosing(routed.responses()) as responses:
                async for response in responses:
                    response.index = index
                    if not response.HasField("placement"):
                        self._first_has_begun.set()
                    if index and response.HasField("finish"):
                        _count_prompt_once(response.finish.usage)
                    await self._items.put(response)


def _count_prompt_once(usage: inference_pb2.Usage) -> None:
    """The prompt belongs to the usage of the first sample, so that the usages of all add up to that of the request."""
    usage.prompt_tokens = 0
    usage.cached.CopyFrom(inference_pb2.CachedTokens())
