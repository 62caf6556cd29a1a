"""A small client of the engine protocol, on the bare stubs of its package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc
from smg_grpc_proto.generated import common_pb2, tokenspeed_scheduler_pb2, tokenspeed_scheduler_pb2_grpc


@dataclass
class EngineAnswer:
    """What one sample got: the tokens of its chunks, and its last message."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_chunks: int = 0
    complete: tokenspeed_scheduler_pb2.GenerateComplete | None = None


class EngineClient:
    """Calls one node as a gateway does."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.channel = (
            grpc.aio.insecure_channel(address) if credentials is None else grpc.aio.secure_channel(address, credentials)
        )
        self.stub = tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub(self.channel)
        self._num_requests = 0

    def call(self, prompt: Iterable[int], sampling: dict[str, object] | None = None, **fields: object):
        """A running Generate call. Gateways say nothing of the deadline and name all sampling parameters."""
        self._num_requests += 1
        defaults = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
        request = tokenspeed_scheduler_pb2.GenerateRequest(
            **{
                "request_id": f"request-{self._num_requests}",
                "tokenized": tokenspeed_scheduler_pb2.TokenizedInput(input_ids=list(prompt)),
                "sampling_params": tokenspeed_scheduler_pb2.SamplingParams(**{**defaults, **(sampling or {})}),
                "logprob_start_len": -1,
                **fields,
            }
        )
        return self.stub.Generate(request)

    async def samples(
        self, prompt: Iterable[int], sampling: dict[str, object] | None = None, **fields: object
    ) -> list[EngineAnswer]:
        answers: dict[int, EngineAnswer] = {}
        async for response in self.call(prompt, sampling, **fields):
            if response.HasField("complete"):
                answers.setdefault(response.complete.index, EngineAnswer()).complete = response.complete
                continue
            chunk = response.chunk
            answer = answers.setdefault(chunk.index, EngineAnswer())
            answer.num_chunks += 1
            answer.token_ids += chunk.token_ids
            answer.logprobs += chunk.output_logprobs.token_logprobs
        return [answers[index] for index in sorted(answers)]

    async def generate(
        self, prompt: Iterable[int], sampling: dict[str, object] | None = None, **fields: object
    ) -> EngineAnswer:
        (answer,) = await self.samples(prompt, sampling, **fields)
        return answer

    async def refusal(
        self, prompt: Iterable[int], sampling: dict[str, object] | None = None, **fields: object
    ) -> tuple[grpc.StatusCode, str]:
        """The status of a request that must fail."""
        try:
            answer = await self.generate(prompt, sampling, **fields)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(f"the request succeeded: {answer}")

    def events(self, start: int = 0):
        """A running subscription to what happens to the cache."""
        return self.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=start))

    async def close(self) -> None:
        await self.channel.close()


def stored_tokens(batches: Sequence[common_pb2.KvEventBatch]) -> list[list[int]]:
    """Tokens of the blocks that these say are stored, in order."""
    return [list(block.token_ids) for batch in batches for event in batch.events for block in event.stored.blocks]
