"""What the router costs: CPU time per request and per streamed token beyond what a client pays without it.

A decode node that only counts streams tokens over gRPC, once to a client of its own and once through a whole router,
all in this process. The difference in CPU time is the router's and its client's. The decision is timed by itself, too.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import numpy as np
import tokenizers
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc, mesh_pb2, mesh_pb2_grpc
from rows import Report

from model_runtime.text.tokenizer import Tokenizer
from model_runtime.text.tokenizer_model import TokenizerModel
from model_runtime.text.vocabulary import Spelling, Vocabulary
from node_runtime.config import NodeConfig
from node_runtime.prefix_feed import PrefixChange, PrefixFeed
from node_runtime.rpc import Channel, NodeService, RpcContext, RpcServer, Telemetry, connect
from router_node.config import RouterConfig
from router_node.node_pool import ComputeRole, NodeFacts, NodePool, TokenLimits
from router_node.observations import Observations
from router_node.placement import Placer
from router_node.prompt_prefixes import PromptPrefixes
from router_node.server import Router

VOCAB_SIZE = 1000
CONTEXT_TOKENS = 100_000
GRANULARITY = 64
MAX_MESSAGE_BYTES = 4 << 20
NUM_REQUESTS = 40


class CountingNode:
    """A decode or prefill node that answers every request with as many tokens as it asks for, one a message."""

    def __init__(self, role: mesh_pb2.NodeRole.ValueType, node_id: str) -> None:
        self.prefix_feed = PrefixFeed()
        self._role = role
        self._node_id = node_id

    def info(self) -> mesh_pb2.NodeInfo:
        return mesh_pb2.NodeInfo(
            node_id=self._node_id,
            incarnation=1,
            role=self._role,
            model_fingerprint="counting",
            vocab_size=VOCAB_SIZE,
            context_tokens=CONTEXT_TOKENS,
            max_request_tokens=CONTEXT_TOKENS,
            prefix_granularity=GRANULARITY,
        )

    async def status(self) -> mesh_pb2.NodeStatus:
        return mesh_pb2.NodeStatus(serving=True)

    async def clear_cache(self) -> bool:
        return True

    async def Generate(
        self, request: decode_pb2.DecodeRequest, context: RpcContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        for number in range(request.max_tokens):
            token = inference_pb2.SampledToken(token_id=number % VOCAB_SIZE)
            yield decode_pb2.DecodeResponse(tokens=decode_pb2.DecodeTokens(tokens=[token]))
        yield decode_pb2.DecodeResponse(finish=decode_pb2.DecodeFinish(reason=inference_pb2.FINISH_REASON_LENGTH))


def measure_router(report: Report) -> None:
    """Adds its rows."""
    _measure_decision(report)
    asyncio.run(_measure_stream(report))


def _measure_decision(report: Report) -> None:
    for num_nodes in (4, 32):
        observations = Observations(max_keys_per_node=65_536)
        listed = {
            role: [f"{role.value}-{number}" for number in range(num_nodes)]
            for role in (ComputeRole.PREFILL, ComputeRole.DECODE)
        }
        pool = NodePool(listed, vocab_size=VOCAB_SIZE)
        for role, addresses in listed.items():
            for address in addresses:
                pool.record_answer(_facts(role, address), is_serving=True)
                keys = tuple(range(8000))
                change = PrefixChange(sequence=1, base_sequence=0, is_snapshot=True, removed=(), stored=keys)
                observations.index.apply(address, 1, change)
        placer = Placer(pool, observations=observations)
        for prompt_tokens in (1000, 12_000):
            tokens = decode_pb2.DecodeRequest(token_ids=range(prompt_tokens)).token_ids
            samples = [_cpu_us(partial(_place, placer, tokens)) for _ in range(60)]
            case = f"router: decision among {num_nodes}+{num_nodes} nodes, prompt of {prompt_tokens:,} tokens"
            report.lower(case, statistics.median(samples), "us per request")


def _place(placer: Placer, tokens: Sequence[int]) -> None:
    choice = placer.choose(prompt_tokens=len(tokens), max_tokens=100, prefixes=PromptPrefixes(tokens, ()))
    with placer.occupied(choice):
        pass


def _facts(role: ComputeRole, address: str) -> NodeFacts:
    return NodeFacts(
        address=address,
        node_id=address,
        incarnation=1,
        role=role,
        model_fingerprint="counting",
        vocab_size=VOCAB_SIZE,
        limits=TokenLimits(context_tokens=CONTEXT_TOKENS, max_request_tokens=CONTEXT_TOKENS),
        prefix_granularity=GRANULARITY,
        capacity_tokens=8000 * GRANULARITY,
    )


async def _measure_stream(report: Report) -> None:
    servers = [
        await _serve(CountingNode(mesh_pb2.NODE_ROLE_PREFILL, "prefill")),
        await _serve(CountingNode(mesh_pb2.NODE_ROLE_DECODE, "decode")),
    ]
    addresses = [server.advertised_address for server in servers]
    config = RouterConfig(model="counting", prefill=(addresses[0],), decode=(addresses[1],), drain_grace_s=0)
    failures: list[BaseException] = []
    router = Router(
        config, _tokenizer(), telemetry=Telemetry.off(), on_fatal=failures.append, on_drain=lambda reason: None
    )
    await router.start()
    direct = connect(addresses[1], max_message_bytes=MAX_MESSAGE_BYTES)
    routed = connect(router.address, max_message_bytes=MAX_MESSAGE_BYTES)
    try:
        for prompt_tokens in (1000, 12_000):
            prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, prompt_tokens).tolist()
            short = await _extra_us(direct, routed, prompt, 1)
            long = await _extra_us(direct, routed, prompt, 257)
            case = f"prompt of {prompt_tokens:,} tokens"
            report.lower(f"router: request and its first token, {case}", short, "us of CPU per request")
            report.lower(f"router: streamed token, {case}", (long - short) / 256, "us of CPU per token")
    finally:
        await direct.close()
        await routed.close()
        await router.stop()
        for server in servers:
            await server.stop(0)
    if failures:
        raise RuntimeError("the router broke down") from failures[0]


async def _extra_us(direct: Channel, routed: Channel, prompt: list[int], max_tokens: int) -> float:
    """CPU time per request through the router less that of one without it."""

    async def ask_direct() -> None:
        request = decode_pb2.DecodeRequest(
            request_id="direct", token_ids=prompt, max_tokens=max_tokens, prefill_address="localhost:1"
        )
        async for _ in direct.server_stream(direct.stub(decode_pb2_grpc.DecodeStub).Generate, request, timeout_s=60):
            pass

    async def ask_routed() -> None:
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(token_ids=prompt), max_tokens=max_tokens, ignore_eos=True
        )
        stub = routed.stub(inference_pb2_grpc.InferenceStub)
        async for _ in routed.server_stream(stub.Generate, request, timeout_s=60):
            pass

    samples = []
    for _ in range(NUM_REQUESTS):
        samples.append(await _cpu_us_of(ask_routed) - await _cpu_us_of(ask_direct))
    return statistics.median(samples)


async def _serve(node: CountingNode) -> RpcServer:
    server = RpcServer(NodeConfig(port=0))
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, node)
    server.add(mesh_pb2_grpc.add_NodeServicer_to_server, NodeService(node, server, lambda reason: None))
    await server.start()
    server.set_serving(True)
    return server


def _tokenizer() -> Tokenizer:
    return Tokenizer(
        TokenizerModel(
            backend=tokenizers.Tokenizer(tokenizers.models.BPE()),
            vocabulary=Vocabulary(
                tokens=tuple(f"{token}," for token in range(VOCAB_SIZE)),
                spelling=Spelling.SENTENCEPIECE,
                verbatim=frozenset(),
                silent=frozenset(),
            ),
            prefix_token_ids=(),
            suffix_token_ids=(),
            eos_token_ids=(),
            max_context_tokens=CONTEXT_TOKENS,
            chat_template=None,
        )
    )


def _cpu_us(action: Callable[[], None]) -> float:
    began_ns = time.process_time_ns()
    action()
    return (time.process_time_ns() - began_ns) / 1000


async def _cpu_us_of(action: Callable[[], Awaitable[None]]) -> float:
    began_ns = time.process_time_ns()
    await action()
    return (time.process_time_ns() - began_ns) / 1000
