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
from simulation.scenario import Request


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a client has of its request so far. `status` is a gRPC status name; None while it runs."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    finish: inference_pb2.Finish | None = None
    placements: list[tuple[str, str]] = field(default_factory=list)
    status: str | None = None
    message: str = ""
    ended_at_s: float = 0.0


class Clients:
    """All clients, in one process."""

    def __init__(self, address: str, transport: Transport, journal: Journal) -> None:
        self._channel = connect(address, max_message_bytes=1 << 20, transport=transport)
        self._stub = self._channel.stub(inference_pb2_grpc.InferenceStub)
        self._journal = journal

    async def ask(self, answer: Answer) -> None:
        """Carries one request to its end, whatever that is."""
        request, event_loop = answer.request, asyncio.get_running_loop()
        self._journal.note("client", lambda: f"asks {request.request_id}")
        limit_s = request.timeout_s if request.cancel_after_s is None else request.cancel_after_s
        try:
            async with asyncio.timeout(None if request.cancel_after_s is None else limit_s):
                await self._read(answer)
            answer.status = "OK" if answer.finish is not None else "NO_FINISH"
        except TimeoutError:
            answer.status = "LEFT"
        except NodeError as error:
            answer.status, answer.message = status_of(error).name, error.message
        answer.ended_at_s = event_loop.time()
        self._journal.note(
            "client",
            lambda: (
                f"{request.request_id} ends in {answer.status} with {len(answer.token_ids)} tokens {answer.message}"
            ),
        )

    async def _read(self, answer: Answer) -> None:
        request = answer.request
        message = inference_pb2.GenerateRequest(
            request_id=request.request_id,
            tokens=inference_pb2.TokenPrompt(token_ids=request.prompt),
            max_tokens=request.max_tokens,
            sampling=inference_pb2.SamplingParams(seed=request.seed),
        )
        stream = self._channel.server_stream(self._stub.Generate, message, timeout_s=request.timeout_s)
        async with aclosing(stream) as responses:
            async for response in responses:
                match response.WhichOneof("event"):
                    case "placement":
                        answer.placements.append((response.placement.prefill_node, response.placement.decode_node))
                    case "delta":
                        answer.token_ids += [token.token_id for token in response.delta.tokens]
                    case "finish":
                        answer.finish = response.finish
