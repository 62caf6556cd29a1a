"""A whole mesh of real processes, and a small client on the bare stubs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from pdmesh.v1 import inference_pb2, inference_pb2_grpc

from support.processes import NodeProcess, wait_until

NUM_LAYERS = 30


@dataclass(slots=True)
class Answer:
    """What one Generate call returned."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[inference_pb2.SampledToken] = field(default_factory=list)
    placement: inference_pb2.Placement | None = None
    finish: inference_pb2.Finish | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0


class Client:
    """Generate over a plain gRPC channel."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    def start(self, timeout_s: float = 100.0, **fields: object):
        return self.stub.Generate(make_request(**fields), timeout=timeout_s)

    def generate(self, timeout_s: float = 100.0, **fields: object) -> Answer:
        return collect(self.start(timeout_s, **fields))

    def error(self, timeout_s: float = 30.0, **fields: object) -> tuple[grpc.StatusCode, str]:
        """The status of a request that must fail."""
        try:
            answer = self.generate(timeout_s, **fields)
        except grpc.RpcError as error:
            return error.code(), error.details()
        raise AssertionError(f"the request succeeded: {answer}")

    def close(self) -> None:
        self.channel.close()


def make_request(
    *,
    text: str | None = None,
    chat: Sequence[tuple[str, str]] | None = None,
    token_ids: Sequence[int] | None = None,
    sampling: dict[str, object] | None = None,
    **fields: object,
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(**fields)
    if text is not None:
        request.text = text
    if chat is not None:
        request.chat.messages.extend(inference_pb2.ChatMessage(role=role, content=content) for role, content in chat)
    if token_ids is not None:
        request.tokens.token_ids.extend(token_ids)
        request.tokens.SetInParent()
    if sampling is not None:
        request.sampling.CopyFrom(inference_pb2.SamplingParams(**sampling))
    return request


def collect(stream, on_delta: Callable[[inference_pb2.Delta], None] | None = None) -> Answer:
    answer = Answer()
    for response in stream:
        match response.WhichOneof("event"):
            case "placement":
                answer.placement = response.placement
            case "delta":
                now = time.monotonic()
                answer.first_token_s = answer.first_token_s or now
                answer.last_token_s = now
                answer.text += response.delta.text
                answer.tokens += response.delta.tokens
                answer.token_ids += [token.token_id for token in response.delta.tokens]
                if on_delta is not None:
                    on_delta(response.delta)
            case "finish":
                answer.finish = response.finish
    return answer


@dataclass(slots=True)
class Mesh:
    """Router in front, compute nodes behind. `client` talks to the router."""

    router: NodeProcess
    nodes: dict[str, NodeProcess]
    client: Client
    empty_lcm_blocks: dict[str, int]

    def assert_all_blocks_return(self, timeout_s: float = 40.0) -> None:
        """Every node returns to its initial count of free blocks, cached prefixes aside, and then exactly to it."""
        for name, node in self.nodes.items():
            wait_until(lambda node=node: is_quiet(node), timeout_s, f"{name} holds nothing for a request")
            node.clear_cache()
            assert node.status().arena.empty_lcm_blocks == self.empty_lcm_blocks[name], name

    def wait_until_whole(self, timeout_s: float = 60.0) -> None:
        """Every process serves, and the router uses every node."""
        for node in (*self.nodes.values(), self.router):
            node.wait_serving(timeout_s)
        wait_until(
            lambda: {peer.state for peer in self.router.status().peers} == {"ready"},
            timeout_s,
            "the router uses all nodes",
        )

    def num_steps(self) -> dict[str, int]:
        return {name: node.status().num_steps for name, node in self.nodes.items()}

    def stop(self) -> None:
        self.client.close()
        for node in (self.router, *reversed(self.nodes.values())):
            assert node.stop() == 0, node.log_text()
            assert "Traceback" not in node.log_text(), node.log_text()


def is_quiet(node: NodeProcess) -> bool:
    status = node.status()
    arena = status.arena
    return (
        status.num_running_requests == status.num_waiting_requests == status.num_handoffs == 0
        and arena.active_lcm_blocks == arena.quarantined_lcm_blocks == 0
        and arena.empty_lcm_blocks + arena.cached_lcm_blocks == arena.total_lcm_blocks
    )


COMPUTE = ("--memory", "512MiB", "--num-threads", "1")


def start_disaggregated(
    model: Path, folder: Path, *, compute: Sequence[str] = COMPUTE, extra: Sequence[str] = ()
) -> Mesh:
    common = ("--model", str(model), "--port", "0", *extra)
    prefill = NodeProcess("prefill", [*common, *compute], folder)
    decode = NodeProcess("decode", [*common, *compute, "--prefill", prefill.address], folder)
    nodes = ("--prefill", prefill.address, "--decode", decode.address)
    router = NodeProcess("router", [*common, *nodes, "--http", "127.0.0.1:0"], folder)
    return assemble(router, {"prefill": prefill, "decode": decode})


def start_fused(model: Path, folder: Path, *, compute: Sequence[str] = COMPUTE, extra: Sequence[str] = ()) -> Mesh:
    common = ("--model", str(model), "--port", "0", *extra)
    fused = NodeProcess("fused", [*common, *compute], folder)
    router = NodeProcess("router", [*common, "--fused", fused.address], folder, name="router-fused")
    return assemble(router, {"fused": fused})


def assemble(router: NodeProcess, nodes: dict[str, NodeProcess]) -> Mesh:
    for node in (*nodes.values(), router):
        node.wait_serving()
    empty = {name: node.status().arena.empty_lcm_blocks for name, node in nodes.items()}
    return Mesh(router=router, nodes=nodes, client=Client(router.address), empty_lcm_blocks=empty)
