"""Prefill, decode and fused nodes in one process: real gRPC, real scheduler, in-memory data plane, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, mesh_pb2, mesh_pb2_grpc

from cache_runtime.transfer.memory_engine import MemoryFabric
from decode_node.config import DecodeNodeConfig, FusedNodeConfig
from decode_node.server import DecodeNode
from node_runtime.clock import Clock
from node_runtime.engine.core import ComputeCore
from node_runtime.rpc import Telemetry
from prefill_node.config import PrefillNodeConfig
from prefill_node.server import PrefillNode
from scheduler_core import Role
from support.endings import ended
from support.fake_compute import FakeExecutor, fake_core


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Lets the nodes work until the condition holds: their threads and sockets are not ours to step."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.002)


@dataclass
class FakeNode:
    """A running node and the parts that tests reach into."""

    node: PrefillNode | DecodeNode
    core: ComputeCore
    fatal: list[BaseException] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.node.address

    @property
    def executor(self) -> FakeExecutor:
        return self.core.executor

    @property
    def endpoint(self) -> str:
        return self.core.require_data_plane().engine.endpoint

    def is_quiet(self) -> bool:
        snapshot = self.node.engine.snapshot
        return (
            self.num_handoffs == 0
            and snapshot.num_live_requests == 0
            and snapshot.active_lcm_blocks == snapshot.quarantined_lcm_blocks == 0
        )

    @property
    def num_handoffs(self) -> int:
        if isinstance(self.node, PrefillNode):
            return self.node.service.num_handoffs
        return self.node._receiving.remote.num_handoffs if self.node._receiving else 0

    async def assert_all_blocks_return(self) -> None:
        await until(self.is_quiet, f"{self.address} is quiet")
        assert not self.fatal
        assert self.core.scheduler.clear_cache()
        capacity = self.core.scheduler.capacity()
        assert capacity.empty_lcm_blocks == capacity.total_lcm_blocks


@dataclass
class Answer:
    tokens: list[inference_pb2.SampledToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    kinds: list[str | None] = field(default_factory=list)
    admitted: decode_pb2.DecodeAdmitted | None = None
    finish: decode_pb2.DecodeFinish | None = None


class FakeMesh:
    """Starts nodes and talks to them. `close` stops everything."""

    def __init__(self, make_core: Callable[..., ComputeCore] = fake_core) -> None:
        """`make_core(role, fabric=..., **settings)` builds what a node computes with."""
        self._make_core = make_core
        self.fabric = MemoryFabric()
        self.drains: list[str] = []
        # How long an engine may stand still: tests hold engines up for as long as they like.
        self.stall_bound_s = 600.0
        self._nodes: list[FakeNode] = []
        self._channels: list[grpc.aio.Channel] = []
        self._num_requests = 0

    async def prefill(
        self,
        *,
        port: int = 0,
        config: dict[str, object] | None = None,
        clock: Clock | None = None,
        telemetry: Telemetry | None = None,
        **core: object,
    ) -> FakeNode:
        made = self._make_core(Role.PREFILL, fabric=self.fabric, **core)
        settings = PrefillNodeConfig(model="fake", port=port, drain_grace_s=5.0, **(config or {}))
        fatal: list[BaseException] = []
        node = PrefillNode(
            settings,
            made,
            telemetry=telemetry or Telemetry.off(),
            on_fatal=fatal.append,
            on_drain=self.drains.append,
            clock=clock,
            stall_bound_s=self.stall_bound_s,
        )
        return await self._started(FakeNode(node, made, fatal))

    async def decode(
        self,
        *prefill: FakeNode | str,
        config: dict[str, object] | None = None,
        telemetry: Telemetry | None = None,
        **core: object,
    ) -> FakeNode:
        made = self._make_core(Role.DECODE, fabric=self.fabric, **core)
        addresses = [item if isinstance(item, str) else item.address for item in prefill]
        settings = DecodeNodeConfig(
            model="fake", prefill=addresses, **{"drain_grace_s": 5.0, "handoff_lease_s": 2.0, **(config or {})}
        )
        fatal: list[BaseException] = []
        # One process: a stream breaks on both sides at once.
        node = DecodeNode(
            settings,
            made,
            telemetry=telemetry or Telemetry.off(),
            on_fatal=fatal.append,
            on_drain=self.drains.append,
            peer_notice_bound_s=0.0,
            stall_bound_s=self.stall_bound_s,
        )
        return await self._started(FakeNode(node, made, fatal))

    async def fused(
        self, *, config: dict[str, object] | None = None, telemetry: Telemetry | None = None, **core: object
    ) -> FakeNode:
        made = self._make_core(Role.FUSED, **core)
        fatal: list[BaseException] = []
        node = DecodeNode(
            FusedNodeConfig(model="fake", **{"drain_grace_s": 5.0, **(config or {})}),
            made,
            telemetry=telemetry or Telemetry.off(),
            on_fatal=fatal.append,
            on_drain=self.drains.append,
        )
        return await self._started(FakeNode(node, made, fatal))

    async def _started(self, node: FakeNode) -> FakeNode:
        await node.node.start()
        self._nodes.append(node)
        return node

    async def kill(self, node: FakeNode) -> None:
        """Ends a node as its death would look from outside: sockets and data plane closed, nothing said."""
        self._nodes.remove(node)
        data_plane = node.core.data_plane
        if data_plane is not None:
            data_plane.planes.close()
        server = node.node._server._server
        await server.stop(grace=None)
        node.node._config = node.node._config.model_copy(update={"drain_grace_s": 0.0})
        await node.node.stop()

    def call(self, node: FakeNode, **fields: object):
        """A running Generate call."""
        self._num_requests += 1
        timeout = fields.pop("timeout", 30.0)
        request = decode_pb2.DecodeRequest(
            **{
                "request_id": f"request-{self._num_requests}",
                "max_tokens": 4,
                "sampling": inference_pb2.SamplingParams(seed=0),
                **fields,
            }
        )
        channel = grpc.aio.insecure_channel(node.address)
        self._channels.append(channel)
        return decode_pb2_grpc.DecodeStub(channel).Generate(request, timeout=timeout)

    async def generate(self, node: FakeNode, prompt: Sequence[int], **fields: object) -> Answer:
        answer = Answer()
        async for response in self.call(node, token_ids=prompt, **fields):
            answer.kinds.append(response.WhichOneof("event"))
            answer.tokens += response.tokens.tokens
            answer.token_ids += [token.token_id for token in response.tokens.tokens]
            if response.HasField("admitted"):
                answer.admitted = response.admitted
            if response.HasField("finish"):
                answer.finish = response.finish
        return answer

    async def error(self, node: FakeNode, prompt: Sequence[int], **fields: object) -> tuple[grpc.StatusCode, str]:
        """The status of a request that must fail."""
        error = await self.failure(node, prompt, **fields)
        return error.code(), error.details() or ""

    async def failure(self, node: FakeNode, prompt: Sequence[int], **fields: object) -> grpc.aio.AioRpcError:
        """How a request fails that must."""
        try:
            answer = await self.generate(node, prompt, **fields)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError(f"the request succeeded: {answer}")

    async def status(self, node: FakeNode) -> mesh_pb2.NodeStatus:
        async with grpc.aio.insecure_channel(node.address) as channel:
            return await mesh_pb2_grpc.NodeStub(channel).GetNodeStatus(mesh_pb2.GetNodeStatusRequest(), timeout=10)

    async def close(self) -> None:
        for channel in self._channels:
            await ended(channel.close(), "the channel of a call")
        for node in reversed(self._nodes):
            await ended(node.node.stop(), node.address)
