"""The clients of a simulated mesh: they send what the scenario says and remember what they got."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

from pdmesh.v1 import inference_pb2, inference_pb2_grpc

from node_runtime.errors import NodeError
from node_runtime.rpc import Transport, connect
from node_runtime.rpc.errors import status_of
from simulation.findings import Journal
from simulation.kernel import Process
from simulation.scenario import Request
from simulation.settings import MAX_MESSAGE_BYTES
from simulation.tenants import Credentials


@dataclass(slots=True, kw_only=True)
class Sample:
    """What a client has of one of the answers that it asked for."""

    token_ids: list[int] = field(default_factory=list)
    finish: inference_pb2.Finish | None = None
    placement: inference_pb2.Placement | None = None

    def take(self, response: inference_pb2.GenerateResponse) -> bool:
        """False for what must not come now: first is one placement, last one finish."""
        is_in_order = self.finish is None
        match response.WhichOneof("event"):
            case "placement":
                is_in_order = self.placement is None
                self.placement = response.placement
            case "delta":
                is_in_order = is_in_order and self.placement is not None
                self.token_ids += [token.token_id for token in response.delta.tokens]
            case "finish":
                is_in_order = is_in_order and self.placement is not None
                self.finish = response.finish
        return is_in_order


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a client has of its request so far. `status` is a gRPC status name; None while it runs."""

    request: Request
    samples: tuple[Sample, ...]
    status: str | None = None
    message: str = ""
    ended_at_s: float = 0.0

    @classmethod
    def to(cls, request: Request) -> Answer:
        """Nothing yet."""
        return cls(request=request, samples=tuple(Sample() for _ in range(request.num_samples)))

    @property
    def is_complete(self) -> bool:
        """Whether every sample has its finish."""
        return all(sample.finish is not None for sample in self.samples)

    @property
    def placed_on(self) -> frozenset[str]:
        """Nodes that the client was told of."""
        placements = [sample.placement for sample in self.samples if sample.placement is not None]
        names = (name for placement in placements for name in (placement.prefill_node, placement.decode_node))
        return frozenset(name for name in names if name)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


class Clients:
    """The clients of one tenant, in one process."""

    def __init__(
        self, process: Process, address: str, transport: Transport, credentials: Credentials, journal: Journal
    ) -> None:
        """`credentials` go with every request."""
        self.process = process
        self._channel = connect(address, max_message_bytes=MAX_MESSAGE_BYTES, transport=transport, metadata=credentials)
        self._stub = self._channel.stub(inference_pb2_grpc.InferenceStub)
        self._journal = journal

    def ask(self, answer: Answer) -> None:
        """Begins a request, which writes into `answer` what comes of it."""
        self.process.create_task(self._ask(answer))

    async def _ask(self, answer: Answer) -> None:
        """Carries one request to its end, whatever that is."""
        request, event_loop = answer.request, asyncio.get_running_loop()
        self._journal.note("client", lambda: f"asks {request.request_id}")
        try:
            async with asyncio.timeout(request.cancel_after_s):
                await self._read(answer)
            answer.status = "OK" if answer.is_complete else "NO_FINISH"
        except TimeoutError:
            answer.status = "LEFT"
        except NodeError as error:
            answer.status, answer.message = status_of(error).name, error.message
        answer.ended_at_s = event_loop.time()
        self._journal.note(
            "client",
            lambda: f"{request.request_id} ends in {answer.status} with {answer.num_tokens} tokens {answer.message}",
        )

    async def _read(self, answer: Answer) -> None:
        request = answer.request
        message = inference_pb2.GenerateRequest(
            request_id=request.request_id,
            tokens=inference_pb2.TokenPrompt(token_ids=request.prompt),
            max_tokens=request.max_tokens,
            sampling=inference_pb2.SamplingParams(seed=request.seed),
            num_samples=request.num_samples,
        )
        stream = self._channel.server_stream(self._stub.Generate, message, timeout_s=request.timeout_s)
        async with aclosing(stream) as responses:
            async for response in responses:
                index = response.index
                if index >= len(answer.samples) or not answer.samples[index].take(response):
                    event = response.WhichOneof("event")
                    self._journal.find("answer", f"{request.request_id}: {event} of sample {index} comes out of turn")
