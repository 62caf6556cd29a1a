"""A small tokenizer, compute nodes that say what a test tells them to, and a client of a router in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import pytest
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc, mesh_pb2, mesh_pb2_grpc
from support.byte_tokenizer import END_TOKEN

from node_runtime.errors import NodeError, PrefillFailed
from node_runtime.rpc.errors import trailers_of
from node_runtime.rpc.status_details import Metadata, make_details
from router_node.server import Router

EOS = END_TOKEN
VOCAB_SIZE = 257
CONTEXT_TOKENS = 64
FINGERPRINT = "sha256:model"


def tokens_event(text: str | bytes) -> decode_pb2.DecodeResponse:
    content = text.encode() if isinstance(text, str) else text
    tokens = [inference_pb2.SampledToken(token_id=byte) for byte in content]
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodeTokens(tokens=tokens))


def admitted_event(*, output_is_structured: bool = False) -> decode_pb2.DecodeResponse:
    cached = inference_pb2.CachedTokens(prefill_device=1, decode_device=0)
    timings = inference_pb2.Timings(prefill_compute_ms=2.5, transfer_ms=1.5, time_to_first_token_ms=4.0)
    admitted = decode_pb2.DecodeAdmitted(cached=cached, timings=timings, output_is_structured=output_is_structured)
    return decode_pb2.DecodeResponse(admitted=admitted)


def progress_event() -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(progress=decode_pb2.DecodeProgress())


def finish_event(
    reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_LENGTH, matched_token_id: int | None = None
) -> decode_pb2.DecodeResponse:
    usage = inference_pb2.Usage(
        prompt_tokens=3, completion_tokens=2, cached=inference_pb2.CachedTokens(prefill_device=1)
    )
    finish = decode_pb2.DecodeFinish(reason=reason, usage=usage, timings=inference_pb2.Timings(transfer_ms=1.5))
    if matched_token_id is not None:
        finish.matched_token_id = matched_token_id
    return decode_pb2.DecodeResponse(finish=finish)


@dataclass
class Refusal:
    """A script step: the decode node ends the call with this status."""

    code: grpc.StatusCode
    message: str
    # What the decode node says beside it: an error of `node_runtime.errors`.
    error: NodeError | None = None

    @property
    def trailers(self) -> Metadata:
        if self.error is None:
            return ()
        return (*make_details(self.error, self.code.value[0], self.message), *trailers_of(self.error))


def blames_prefill(code: grpc.StatusCode, message: str) -> Refusal:
    """The decode node says that the prefill node failed."""
    return Refusal(code, message, PrefillFailed(code.name, message, address="127.0.0.1:1"))


class Hang:
    """A script step: the decode node says nothing more."""


# An event is a step that waits for it.
Step = decode_pb2.DecodeResponse | Refusal | Hang | asyncio.Event


@dataclass
class FakeNode:
    """One compute node. `script` is what its Generate does; what it was asked is kept."""

    role: mesh_pb2.NodeRole
    node_id: str
    fingerprint: str = FINGERPRINT
    vocab_size: int = VOCAB_SIZE
    max_request_tokens: int = CONTEXT_TOKENS
    serving: bool = True
    draining: bool = False
    reports_progress: bool = False
    adapters: Sequence[inference_pb2.Adapter] = ()
    script: Sequence[Step] = ()
    # The script of one request, where they differ.
    script_for: Callable[[decode_pb2.DecodeRequest], Sequence[Step]] | None = None
    requests: list[decode_pb2.DecodeRequest] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    # What its Follow says; None: it has no such call.
    updates: Sequence[mesh_pb2.NodeUpdate] | None = None
    followers: list[mesh_pb2.FollowRequest] = field(default_factory=list)
    prefix_granularity: int = 0
    capacity_tokens: int = 0
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    num_running: int = 0
    # What its status tells beside whether it serves.
    gauges: mesh_pb2.NodeStatus = field(default_factory=mesh_pb2.NodeStatus)
    address: str = ""
    server: grpc.aio.Server | None = None

    async def start(self) -> FakeNode:
        self.server = grpc.aio.server()
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self.server)  # type: ignore[arg-type]
        mesh_pb2_grpc.add_NodeServicer_to_server(self, self.server)  # type: ignore[arg-type]
        port = self.server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self.server.start()
        return self

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)

    async def GetNodeInfo(self, request: mesh_pb2.GetNodeInfoRequest, context: object) -> mesh_pb2.NodeInfo:
        return mesh_pb2.NodeInfo(
            node_id=self.node_id,
            incarnation=7,
            role=self.role,
            model_fingerprint=self.fingerprint,
            vocab_size=self.vocab_size,
            context_tokens=CONTEXT_TOKENS,
            max_request_tokens=self.max_request_tokens,
            prefix_granularity=self.prefix_granularity,
            capacity_tokens=self.capacity_tokens,
            reports_progress=self.reports_progress,
            adapters=self.adapters,
        )

    async def GetNodeStatus(self, request: mesh_pb2.GetNodeStatusRequest, context: object) -> mesh_pb2.NodeStatus:
        status = mesh_pb2.NodeStatus(serving=self.serving, draining=self.draining)
        status.MergeFrom(self.gauges)
        return status

    async def Follow(
        self,
        request: mesh_pb2.FollowRequest,
        context: grpc.aio.ServicerContext[mesh_pb2.FollowRequest, mesh_pb2.NodeUpdate],
    ) -> AsyncIterator[mesh_pb2.NodeUpdate]:
        self.followers.append(request)
        if self.updates is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a node of an older release")
        for update in self.updates or ():
            yield update
        await asyncio.Event().wait()

    async def ClearCache(self, request: mesh_pb2.ClearCacheRequest, context: object) -> mesh_pb2.ClearCacheResponse:
        return mesh_pb2.ClearCacheResponse()

    async def Drain(self, request: mesh_pb2.DrainRequest, context: object) -> mesh_pb2.DrainResponse:
        return mesh_pb2.DrainResponse()

    async def Generate(
        self,
        request: decode_pb2.DecodeRequest,
        context: grpc.aio.ServicerContext[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse],
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        self.requests.append(request)
        self.num_running += 1
        self.metadata.append(dict(context.invocation_metadata() or ()))
        try:
            for step in self.script if self.script_for is None else self.script_for(request):
                if isinstance(step, Refusal):
                    await context.abort(step.code, step.message, step.trailers)
                elif isinstance(step, Hang):
                    await asyncio.Event().wait()
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.num_running -= 1


@dataclass(frozen=True)
class RunningRouter:
    """A started router and a client of it."""

    router: Router
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceAsyncStub
    node: mesh_pb2_grpc.NodeAsyncStub

    async def generate(self, **fields: object) -> list[inference_pb2.GenerateResponse]:
        request = inference_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]
        return [response async for response in self.stub.Generate(request, timeout=20)]

    async def refusal(self, **fields: object) -> tuple[grpc.StatusCode, str]:
        """Status and message of a request that must fail."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.generate(**fields)
        return caught.value.code(), caught.value.details() or ""


StartNode = Callable[..., Awaitable[FakeNode]]
StartRouter = Callable[..., Awaitable[RunningRouter]]
