"""Adapters at the router: who has which, what is listed, where requests go, and what keeps their caches apart."""

from __future__ import annotations

import grpc
import openai
import pytest
from pdmesh.v1 import decode_pb2, inference_pb2, mesh_pb2
from unit.router_node.fakes import FakeNode, Hang, StartNode, StartRouter, finish_event, tokens_event
from unit.router_node.openai_api.clients import client_of

from node_runtime.adapters import AdapterId, isolation_keys
from node_runtime.errors import InvalidRequest
from node_runtime.request_rules import MAX_EXTRA_KEY_BYTES
from router_node.discovery import facts_of
from router_node.node_pool import ComputeRole, NodeFacts, NodePool, TokenLimits
from router_node.placement import NoUsableNode, Placer

PREFILL, DECODE, FUSED = ComputeRole.PREFILL, ComputeRole.DECODE, ComputeRole.FUSED
OLD, NEW, BLUE = (
    AdapterId(name=name, digest=bytes([number]) * 32) for number, name in enumerate(("red", "red", "blue"), 1)
)
ANSWER = [tokens_event("ab"), finish_event()]


def told(adapter: AdapterId) -> inference_pb2.Adapter:
    return inference_pb2.Adapter(name=adapter.name, digest=adapter.digest)


def facts(address: str, role: ComputeRole, *adapters: AdapterId, prefills_locally: bool = False) -> NodeFacts:
    return NodeFacts(
        address=address,
        node_id=address,
        incarnation=1,
        role=role,
        model_fingerprint="m",
        vocab_size=100,
        limits=TokenLimits(context_tokens=64, max_request_tokens=64),
        prefills_locally=prefills_locally,
        adapters=frozenset(adapters),
    )


def pool_of(*nodes: NodeFacts) -> NodePool:
    members = {role: [node.address for node in nodes if node.role is role] for role in ComputeRole}
    pool = NodePool(members, vocab_size=100)
    for node in nodes:
        pool.record_answer(node, is_serving=True)
    return pool


def chosen(pool: NodePool, adapter: AdapterId | None) -> tuple[str, ...]:
    return Placer(pool, policy="least_loaded").choose(prompt_tokens=3, max_tokens=3, adapter=adapter).addresses


def test_requests_go_to_nodes_that_have_the_very_adapter() -> None:
    pool = pool_of(
        facts("p:1", PREFILL, OLD),
        facts("p:2", PREFILL, NEW, BLUE),
        facts("d:1", DECODE, OLD, BLUE),
        facts("d:2", DECODE, NEW),
    )
    assert chosen(pool, OLD) == ("d:1", "p:1")
    assert chosen(pool, NEW) == ("d:2", "p:2")
    assert chosen(pool, BLUE) == ("d:1", "p:2")
    for adapter in (OLD, NEW, BLUE, None):
        assert chosen(pool, adapter)


def test_a_node_that_needs_no_prefill_node_is_enough() -> None:
    assert chosen(pool_of(facts("f:1", FUSED), facts("f:2", FUSED, OLD)), OLD) == ("f:2",)
    pool = pool_of(facts("p:1", PREFILL), facts("d:1", DECODE, OLD, prefills_locally=True))
    assert chosen(pool, OLD) == ("d:1",)


@pytest.mark.parametrize(
    "nodes",
    [
        (facts("p:1", PREFILL, OLD), facts("d:1", DECODE)),
        (facts("p:1", PREFILL), facts("d:1", DECODE, OLD)),
        (facts("p:1", PREFILL, NEW), facts("d:1", DECODE, OLD)),
    ],
)
def test_where_no_pair_has_it_a_request_is_refused_and_not_computed_otherwise(nodes: tuple[NodeFacts, ...]) -> None:
    with pytest.raises(NoUsableNode, match=r'no usable nodes have the adapter "red" \(sha256 010101010101\)'):
        chosen(pool_of(*nodes), OLD)


def test_a_name_stands_for_what_most_nodes_that_decode_have_under_it() -> None:
    nodes = [facts("d:1", DECODE, OLD), facts("d:2", DECODE, NEW, BLUE), facts("d:3", DECODE, NEW)]
    pool = pool_of(facts("p:1", PREFILL, OLD), *nodes)
    # They would find no prefill node.
    assert pool.adapters() == {"red": OLD, "blue": BLUE}
    pool = pool_of(facts("p:1", PREFILL, OLD), facts("p:2", PREFILL, NEW), *nodes)
    assert pool.adapters() == {"red": NEW, "blue": BLUE}
    # What nobody has for the moment is still known.
    for address in ("d:2", "d:3"):
        pool.record_failure(address, "gone")
    assert pool.adapters() == {"red": OLD, "blue": BLUE}
    assert pool_of(facts("p:1", PREFILL, OLD), facts("d:1", DECODE)).adapters() == {}


def test_no_key_of_a_request_can_be_that_of_an_adapter() -> None:
    (key,) = isolation_keys([], OLD)
    assert len(key) > MAX_EXTRA_KEY_BYTES
    assert not key.decode().isprintable()
    assert isolation_keys([b"tenant"], OLD) == [b"tenant", key]
    assert isolation_keys([b"tenant"], None) == [b"tenant"]
    assert isolation_keys([], NEW) != [key]
    # Whatever it is called: one name more for the same bytes.
    assert isolation_keys([], AdapterId(name="other", digest=OLD.digest)) == [key]


@pytest.mark.parametrize(
    "adapters",
    [
        [inference_pb2.Adapter(name="", digest=bytes(32))],
        [inference_pb2.Adapter(name="a\n", digest=bytes(32))],
        [inference_pb2.Adapter(name="a", digest=bytes(31))],
        [inference_pb2.Adapter(name="a")],
        [told(OLD), told(NEW)],
        [inference_pb2.Adapter(name=f"{index}", digest=bytes(32)) for index in range(1025)],
    ],
)
def test_a_node_that_tells_nonsense_of_its_adapters_is_refused(adapters: list[inference_pb2.Adapter]) -> None:
    info = mesh_pb2.NodeInfo(
        node_id="n",
        role=mesh_pb2.NODE_ROLE_FUSED,
        vocab_size=9,
        context_tokens=9,
        max_request_tokens=9,
        adapters=adapters,
    )
    with pytest.raises(InvalidRequest, match="adapter"):
        facts_of("n:1", info)


async def fused_with(start_node: StartNode, name: str, *adapters: AdapterId, **fields: object) -> FakeNode:
    return await start_node(
        mesh_pb2.NODE_ROLE_FUSED, name, adapters=[told(adapter) for adapter in adapters], **{"script": ANSWER, **fields}
    )


async def test_models_list_each_adapter_with_its_parent(start_node: StartNode, start_router: StartRouter) -> None:
    running = await start_router(await fused_with(start_node, "fused", OLD, BLUE), http="127.0.0.1:0")
    listed = await running.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10)
    assert [(card.name, card.parent) for card in listed.models] == [("tiny", ""), ("blue", "tiny"), ("red", "tiny")]
    assert len({(card.context_tokens, card.vocab_size) for card in listed.models}) == 1
    async with client_of(running) as client:
        cards = [card.model_dump() for card in (await client.models.list()).data]
        alone = await client.models.retrieve("red")
        with pytest.raises(openai.NotFoundError, match='"tiny", "blue", "red" are'):
            await client.models.retrieve("green")
    assert {card["id"]: card.get("parent") for card in cards} == {"tiny": None, "blue": "tiny", "red": "tiny"}
    assert alone.model_dump()["parent"] == "tiny"


async def test_http_clients_name_an_adapter_as_the_model(start_node: StartNode, start_router: StartRouter) -> None:
    node = await fused_with(start_node, "fused", OLD)
    running = await start_router(node, http="127.0.0.1:0")
    async with client_of(running) as client:
        for model in ("red", "tiny"):
            told = await client.completions.create(model=model, prompt="hi", max_tokens=2)
            assert told.model == model
        with pytest.raises(openai.NotFoundError) as refused:
            await client.completions.create(model="green", prompt="hi")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert 'model: "green" is not served here, only "tiny", "red" are' in refused.value.message
    assert [request.adapter.digest for request in node.requests] == [OLD.digest, b""]


async def test_a_hedge_and_the_samples_of_a_request_have_its_adapter(
    start_node: StartNode, start_router: StartRouter
) -> None:
    asked: list[decode_pb2.DecodeRequest] = []

    def first_hangs(request: decode_pb2.DecodeRequest) -> list[object]:
        asked.append(request)
        return [Hang()] if len(asked) == 1 else ANSWER

    nodes = [await fused_with(start_node, f"fused-{index}", OLD, script_for=first_hangs) for index in range(2)]
    await fused_with(start_node, "without")
    running = await start_router(*nodes, hedge_after_s=0.05)
    await running.generate(text="hi", adapter="red", num_samples=2)
    assert len(asked) == 3
    assert {request.adapter.digest for request in asked} == {OLD.digest}


async def test_adapter_and_contradictions_are_refused_by_name(start_node: StartNode, start_router: StartRouter) -> None:
    running = await start_router(await fused_with(start_node, "fused", OLD, BLUE))
    code, message = await running.refusal(text="hi", adapter="green")
    assert (code, message) == (
        grpc.StatusCode.NOT_FOUND,
        'adapter: "green" is not served here, only "blue", "red"',
    )
    code, _ = await running.refusal(text="hi", model="red", adapter="blue")
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_before_any_node_was_heard_of_an_adapter_may_yet_be_served(
    start_node: StartNode, start_router: StartRouter
) -> None:
    node = await fused_with(start_node, "fused", OLD)
    await node.stop()
    running = await start_router(node)
    for named in ({"adapter": "red"}, {"model": "red"}):
        code, message = await running.refusal(text="hi", **named)
        assert code is grpc.StatusCode.UNAVAILABLE, named
        assert node.address in message
