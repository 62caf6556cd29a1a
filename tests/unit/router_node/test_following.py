"""The router places by what nodes tell about their caches and loads, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pdmesh.v1 import inference_pb2, mesh_pb2, mesh_pb2_grpc
from unit.router_node.fakes import FINGERPRINT, RunningRouter, StartNode, StartRouter, finish_event, tokens_event

from node_runtime.config import NodeConfig
from node_runtime.node_updates import change_to_proto
from node_runtime.prefix_feed import PrefixChange, PrefixFeed
from node_runtime.rpc import ChannelPool, NodeService, RpcServer, Telemetry
from router_node.node_follower import NodeFollower, report_of
from router_node.observations import Observations
from router_node.prompt_prefixes import PromptPrefixes

PREFILL, DECODE = mesh_pb2.NODE_ROLE_PREFILL, mesh_pb2.NODE_ROLE_DECODE
PROMPT = list(range(1, 41))
ANSWER = [tokens_event("ab"), finish_event()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def _update(
    stored: Sequence[int], *, sequence: int = 1, base: int = 0, incarnation: int = 7, **status: object
) -> mesh_pb2.NodeUpdate:
    change = PrefixChange(
        sequence=sequence, base_sequence=base, is_snapshot=base == 0, removed=(), stored=tuple(stored)
    )
    return mesh_pb2.NodeUpdate(
        incarnation=incarnation,
        status=mesh_pb2.NodeStatus(serving=True, **status),  # type: ignore[arg-type]
        prefixes=change_to_proto(change),
    )


def _keys(salt: bytes = b"") -> list[int]:
    return PromptPrefixes(PROMPT, [salt] if salt else []).keys(8)


async def _ask(router: RunningRouter, salt: bytes = b"") -> inference_pb2.Placement:
    prompt = inference_pb2.TokenPrompt(token_ids=PROMPT)
    first, *_ = await router.generate(tokens=prompt, max_tokens=2, cache_salt=salt)
    return first.placement


async def test_a_prompt_goes_where_it_is_cached_and_the_trace_says_why(
    start_node: StartNode, start_router: StartRouter
) -> None:
    nodes = [
        await start_node(PREFILL, "p-1", updates=[_update(_keys(b"red"))], prefix_granularity=8),
        await start_node(PREFILL, "p-2", updates=[_update(_keys(b"blue"))], prefix_granularity=8),
        await start_node(DECODE, "d-1", updates=[], prefix_granularity=8, script=ANSWER),
    ]
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    running = await start_router(*nodes, telemetry=Telemetry(provider))
    index = running.router.observations.index
    await until(lambda: all(index.num_keys(node.address) for node in nodes[:2]))
    for _ in range(3):
        # Salts are in the keys: the same prompt, somebody else's cache.
        assert (await _ask(running, b"red")).prefill_node == "p-1"
        assert (await _ask(running, b"blue")).prefill_node == "p-2"
    (attributes, *_) = [span.attributes for span in exporter.get_finished_spans() if span.name == "pdmesh.place"]
    assert attributes is not None
    assert attributes["pdmesh.place.policy"] == "cache_aware"
    assert attributes["pdmesh.place.candidates"] == 2
    assert attributes["pdmesh.place.prefill_cached_tokens"] == 32
    assert attributes["pdmesh.place.reason"] == "the longest cached prefix"
    (runner_up,) = attributes["pdmesh.place.runners_up"]
    assert runner_up.startswith("p-2 > d-1: ")


async def test_without_the_policy_caches_are_not_looked_at(start_node: StartNode, start_router: StartRouter) -> None:
    nodes = [
        await start_node(PREFILL, "p-1", updates=[_update(_keys())], prefix_granularity=8),
        await start_node(PREFILL, "p-2", updates=[], prefix_granularity=8),
        await start_node(DECODE, "d-1", updates=[], prefix_granularity=8, script=ANSWER),
    ]
    running = await start_router(*nodes, placement_policy="round_robin")
    assert {(await _ask(running)).prefill_node for _ in range(2)} == {"p-1", "p-2"}
    await until(lambda: bool(nodes[0].followers))
    assert not nodes[0].followers[0].wants_prefixes
    unheard = await start_router(*nodes, follow_interval_s=0)
    assert (await _ask(unheard)).decode_node == "d-1"
    assert len(nodes[0].followers) == 1


async def test_no_more_is_kept_of_a_node_than_the_router_is_told_to(
    start_node: StartNode, start_router: StartRouter
) -> None:
    nodes = [
        await start_node(PREFILL, "p-1", updates=[_update(range(1, 50))], prefix_granularity=8),
        await start_node(DECODE, "d-1", updates=[], prefix_granularity=8, script=ANSWER),
    ]
    index = (await start_router(*nodes, max_prefixes_per_node=5)).router.observations.index
    await until(lambda: index.num_keys(nodes[0].address) > 0)
    assert index.num_keys(nodes[0].address) == 5


async def test_a_load_that_other_routers_made_counts(start_node: StartNode, start_router: StartRouter) -> None:
    busy = [_update((), num_running_requests=50), _update((), num_waiting_requests=60)]
    nodes = [
        await start_node(PREFILL, "p-1", updates=[]),
        await start_node(DECODE, "d-1", updates=busy, script=ANSWER),
        await start_node(DECODE, "d-2", updates=[], script=ANSWER),
    ]
    for policy in ("least_loaded", "cache_aware"):
        running = await start_router(*nodes, placement_policy=policy)
        load = running.router.observations.load_of(nodes[1].address)
        await until(lambda load=load: load.num_foreign_requests == 50)
        assert {(await _ask(running)).decode_node for _ in range(4)} == {"d-2"}


@pytest.fixture
async def channels() -> AsyncIterator[ChannelPool]:
    channels = ChannelPool(max_message_bytes=1 << 20)
    yield channels
    await channels.close()


def _follower(channels: ChannelPool, seen: Observations) -> NodeFollower:
    return NodeFollower(
        channels,
        seen,
        capacity_tokens=lambda address: 1000,
        interval_s=0.01,
        retry_interval_s=0.01,
        wants_prefixes=True,
    )


async def test_a_gap_makes_the_follower_ask_for_everything_anew(start_node: StartNode, channels: ChannelPool) -> None:
    node = await start_node(PREFILL, "p-1", updates=[_update([1], sequence=4), _update([2], sequence=9, base=8)])
    seen = Observations(max_keys_per_node=10)
    running = asyncio.create_task(_follower(channels, seen).follow(node.address))
    await until(lambda: len(node.followers) >= 2)
    # The first stream began with nothing; so did the next, after the gap.
    assert [request.prefix_sequence for request in node.followers[:2]] == [0, 0]
    running.cancel()


async def test_what_makes_no_sense_is_not_taken(start_node: StartNode, channels: ChannelPool) -> None:
    too_many = mesh_pb2.NodeUpdate(incarnation=7, status=mesh_pb2.NodeStatus(peers=[mesh_pb2.PeerStatus()] * 4097))
    node = await start_node(PREFILL, "p-1", updates=[too_many, _update([1])])
    seen = Observations(max_keys_per_node=10)
    running = asyncio.create_task(_follower(channels, seen).follow(node.address))
    await until(lambda: len(node.followers) >= 2)
    assert seen.index.num_keys(node.address) == 0
    running.cancel()


async def test_a_node_of_an_older_release_is_left_alone(start_node: StartNode, channels: ChannelPool) -> None:
    node = await start_node(PREFILL, "old", updates=None)
    seen = Observations(max_keys_per_node=10)
    running = asyncio.create_task(_follower(channels, seen).follow(node.address))
    await until(lambda: len(node.followers) == 1)
    await asyncio.sleep(0.05)
    assert len(node.followers) == 1
    running.cancel()


class Reporter:
    """A prefill node that serves, with a cache."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.prefix_feed = PrefixFeed()

    def info(self) -> mesh_pb2.NodeInfo:
        return mesh_pb2.NodeInfo(
            node_id="p-1", incarnation=self.incarnation, role=PREFILL, model_fingerprint=FINGERPRINT
        )

    async def status(self) -> mesh_pb2.NodeStatus:
        return mesh_pb2.NodeStatus(serving=True)

    async def clear_cache(self) -> bool:
        return True


async def _serve(reporter: Reporter, port: int = 0) -> RpcServer:
    server = RpcServer(NodeConfig(node_id="p-1", port=port))
    service = NodeService(reporter, server, [].append)
    server.add(mesh_pb2_grpc.add_NodeServicer_to_server, service)
    await server.start()
    return server


async def test_a_follower_keeps_up_with_a_node_through_a_restart(channels: ChannelPool) -> None:
    reporter, seen = Reporter(incarnation=1), Observations(max_keys_per_node=100)
    server = await _serve(reporter)
    address = server.advertised_address
    running = asyncio.create_task(_follower(channels, seen).follow(address))
    reporter.prefix_feed.apply(is_cleared=False, removed=(), stored=(1, 2))
    await until(lambda: seen.index.find_depths([1, 2], [address]) == {address: 2})
    reporter.prefix_feed.apply(is_cleared=False, removed=(2,), stored=(3,))
    await until(lambda: seen.index.find_depths([1, 2, 3], [address]) == {address: 3})
    assert seen.index.find_depths([2], [address]) == {}
    reporter.prefix_feed.apply(is_cleared=True, removed=(), stored=())
    await until(lambda: seen.index.num_keys(address) == 0)
    await server.stop(0)
    again = Reporter(incarnation=2)
    again.prefix_feed.apply(is_cleared=False, removed=(), stored=(9,))
    server = await _serve(again, server.port)
    await until(lambda: seen.index.find_depths([9], [address]) == {address: 1})
    assert seen.index.position(address)[0] == 2
    running.cancel()
    await server.stop(0)


def test_a_report_says_how_many_tokens_the_memory_holds_and_which_peers_are_proved() -> None:
    arena = mesh_pb2.ArenaStatus(total_lcm_blocks=10, empty_lcm_blocks=2, cached_lcm_blocks=3, active_lcm_blocks=5)
    peers = [mesh_pb2.PeerStatus(address="a:1", state="ready"), mesh_pb2.PeerStatus(address="b:1", state="suspect")]
    status = mesh_pb2.NodeStatus(num_waiting_requests=1, num_running_requests=2, arena=arena, peers=peers)
    report = report_of(status, 1000)
    assert (report.num_requests, report.free_tokens, report.peers) == (3, 500, {"a:1": True, "b:1": False})
    assert report_of(status, 0).free_tokens is None
