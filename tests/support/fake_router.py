"""A real router in front of the nodes of a FakeMesh, and a client of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
import pytest
from pdmesh.v1 import inference_pb2, inference_pb2_grpc, mesh_pb2, mesh_pb2_grpc

from node_runtime.rpc import Telemetry
from router_node.config import RouterConfig
from router_node.server import Router
from support.byte_tokenizer import make_tokenizer
from support.endings import ended
from support.fake_compute import VOCAB_SIZE
from support.fake_mesh import FakeNode


@dataclass
class RoutedAnswer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    kinds: list[str | None] = field(default_factory=list)
    finish: inference_pb2.Finish | None = None

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        self.kinds.append(response.WhichOneof("event"))
        self.text += response.delta.text
        self.token_ids += [token.token_id for token in response.delta.tokens]
        if response.HasField("finish"):
            self.finish = response.finish


class FakeRouter:
    """`async with FakeRouter(prefill=..., decode=...) as router`."""

    def __init__(
        self,
        *,
        prefill: list[FakeNode],
        decode: list[FakeNode],
        vocab_size: int = VOCAB_SIZE,
        telemetry: Telemetry | None = None,
        **settings: object,
    ) -> None:
        addresses = {"prefill": [node.address for node in prefill], "decode": [node.address for node in decode]}
        # Tests count on turns, whatever is cached where.
        own = {
            "model": "fake.gguf",
            "idle_poll_interval_s": 600,
            "drain_grace_s": 0,
            "placement_policy": "least_loaded",
        }
        values = {**own, **addresses, **settings}
        self.router = Router(
            RouterConfig.model_validate(values),
            make_tokenizer(vocab_size=vocab_size, context_tokens=256),
            telemetry=telemetry or Telemetry.off(),
            on_fatal=pytest.fail,
            on_drain=pytest.fail,
        )

    async def __aenter__(self) -> FakeRouter:
        await self.router.start()
        self._channel = grpc.aio.insecure_channel(self.router.address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await ended(self._channel.close(), "the channel of the client")
        await ended(self.router.stop(), "the router")

    def call(self, prompt: list[int], *, timeout: float = 30.0, seed: int = 0, **fields: object):
        """A running Generate call."""
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(token_ids=prompt),
            **{
                "max_tokens": 4,
                "ignore_eos": True,
                "sampling": inference_pb2.SamplingParams(seed=seed),
                **fields,
            },
        )
        return self._stub.Generate(request, timeout=timeout)

    async def status(self) -> mesh_pb2.NodeStatus:
        stub = mesh_pb2_grpc.NodeStub(self._channel)
        return await stub.GetNodeStatus(mesh_pb2.GetNodeStatusRequest(), timeout=10)

    async def generate(self, prompt: list[int], **fields: object) -> RoutedAnswer:
        answer = RoutedAnswer()
        async for response in self.call(prompt, **fields):
            answer.take(response)
        return answer
