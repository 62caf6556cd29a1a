"""A slow first token is waited for on other nodes as well: one of the two answers, the other one is ended."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pdmesh.v1 import decode_pb2, inference_pb2, mesh_pb2
from support.fake_mesh import until
from unit.router_node.fakes import (
    FakeNode,
    Hang,
    Refusal,
    RunningRouter,
    StartNode,
    StartRouter,
    Step,
    admitted_event,
    finish_event,
    tokens_event,
)

from node_runtime.rpc import Telemetry
from router_node.hedging import MIN_KNOWN, HedgePolicy, Hedges
from router_node.node_pool import ComputeRole
from router_node.retry import RetryBudget

DECODE, PREFILL = mesh_pb2.NODE_ROLE_DECODE, mesh_pb2.NODE_ROLE_PREFILL
AFTER_S = 0.1
GOOD: list[Step] = [admitted_event(), tokens_event("ab"), finish_event()]


def _text(responses: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


async def _status(router: RunningRouter) -> mesh_pb2.NodeStatus:
    return await router.node.GetNodeStatus(mesh_pb2.GetNodeStatusRequest())


class Scripts:
    """What the first node that is asked does, and what the second one does."""

    def __init__(self, first: list[Step], second: list[Step]) -> None:
        self._scripts = [first, second]
        self.asked: list[decode_pb2.DecodeRequest] = []

    def __call__(self, request: decode_pb2.DecodeRequest) -> list[Step]:
        self.asked.append(request)
        return self._scripts[min(len(self.asked), 2) - 1]


async def _two_of_each(start_node: StartNode, scripts: Scripts) -> list[FakeNode]:
    return [
        await start_node(PREFILL, "prefill-1"),
        await start_node(PREFILL, "prefill-2"),
        await start_node(DECODE, "decode-1", script_for=scripts),
        await start_node(DECODE, "decode-2", script_for=scripts),
    ]


async def test_a_hedge_that_is_sooner_answers_and_the_slow_attempt_is_ended(
    start_router: StartRouter, start_node: StartNode
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    scripts = Scripts([Hang()], GOOD)
    nodes = await _two_of_each(start_node, scripts)
    router = await start_router(*nodes, hedge_after_s=AFTER_S, telemetry=Telemetry(provider), served_model_name="tiny")
    responses = await router.generate(text="hi", request_id="mine", sampling=inference_pb2.SamplingParams(seed=5))
    assert [response.WhichOneof("event") for response in responses] == ["placement", "delta", "finish"]
    assert _text(responses) == "ab"
    first, second = scripts.asked
    assert (first.request_id, second.request_id) == ("mine", "mine~2")
    assert first.prefill_address != second.prefill_address
    assert first.sampling == second.sampling
    slow = next(node for node in nodes if first in node.requests)
    await asyncio.wait_for(slow.cancelled.wait(), 10)
    finish = responses[-1].finish
    # It was moved nowhere, and what was cached is what the node that answered says.
    assert finish.num_replacements == 0
    assert finish.usage == inference_pb2.Usage(
        prompt_tokens=2, completion_tokens=2, cached=inference_pb2.CachedTokens(prefill_device=1)
    )
    # The wait for the slow node is part of the time to the first token.
    assert finish.timings.time_to_first_token_ms >= AFTER_S * 1000
    status = await _status(router)
    assert (status.num_hedges, status.num_won_hedges, status.num_retries) == (1, 1, 1)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    attributes = dict(spans["pdmesh.hedge"].attributes or {})
    root = spans["text_completion tiny"]
    assert spans["pdmesh.hedge"].parent == root.context
    assert (attributes["pdmesh.hedge_outcome"], attributes["pdmesh.attempt"]) == ("won", 2)
    assert attributes["pdmesh.decode_node"] == dict(root.attributes or {})["pdmesh.decode_node"]


async def test_a_first_attempt_that_is_sooner_after_all_answers_and_the_hedge_is_ended(
    start_router: StartRouter, start_node: StartNode
) -> None:
    hedge_is_there = asyncio.Event()
    scripts = Scripts([hedge_is_there, *GOOD], [admitted_event(), Hang()])
    nodes = await _two_of_each(start_node, scripts)
    router = await start_router(*nodes, hedge_after_s=AFTER_S)
    running = asyncio.ensure_future(router.generate(text="hi"))
    await until(lambda: len(scripts.asked) == 2, "both were asked")
    hedge_is_there.set()
    responses = await running
    assert _text(responses) == "ab"
    hedged = next(node for node in nodes if scripts.asked[1] in node.requests)
    await asyncio.wait_for(hedged.cancelled.wait(), 10)
    status = await _status(router)
    assert (status.num_hedges, status.num_won_hedges, status.num_running_requests) == (1, 0, 0)


@pytest.mark.parametrize("settings", [{}, {"hedge_after_s": AFTER_S, "retry_burst": 0, "retry_ratio": 0}])
async def test_nothing_is_hedged_unless_it_is_wanted_and_the_budget_of_the_retries_allows_it(
    start_router: StartRouter, start_node: StartNode, settings: dict[str, float]
) -> None:
    scripts = Scripts([Hang()], GOOD)
    router = await start_router(*await _two_of_each(start_node, scripts), **settings)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in router.stub.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=0.6):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(scripts.asked) == 1
    assert (await _status(router)).num_hedges == 0


async def test_a_hedge_shares_no_node_with_what_it_hedges(
    start_router: StartRouter, start_node: StartNode, prefill: FakeNode
) -> None:
    scripts = Scripts([Hang()], GOOD)
    nodes = [await start_node(DECODE, name, script_for=scripts) for name in ("decode-1", "decode-2")]
    router = await start_router(prefill, *nodes, hedge_after_s=AFTER_S)
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in router.stub.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=0.6):
            pass
    assert len(scripts.asked) == 1


@pytest.mark.parametrize("failing", [0, 1])
async def test_when_one_of_two_fails_the_other_one_answers(
    start_router: StartRouter, start_node: StartNode, failing: int
) -> None:
    both_are_there = asyncio.Event()
    broken: list[Step] = [both_are_there, Refusal(grpc.StatusCode.UNAVAILABLE, "died")]
    last = asyncio.Event()
    scripts = [broken, [last, *GOOD]]
    asked = Scripts(*(scripts if failing == 0 else reversed(scripts)))
    nodes = await _two_of_each(start_node, asked)
    router = await start_router(*nodes, hedge_after_s=AFTER_S)
    running = asyncio.ensure_future(router.generate(text="hi"))
    await until(lambda: len(asked.asked) == 2, "both were asked")
    both_are_there.set()
    pool = router.router._pool
    await until(lambda: not all(node.is_trusted for node in pool.usable(ComputeRole.DECODE)), "one of them has failed")
    last.set()
    responses = await running
    assert _text(responses) == "ab"
    assert len(asked.asked) == 2
    assert responses[-1].finish.num_replacements == 0


async def test_when_both_fail_a_third_attempt_follows(start_router: StartRouter, start_node: StartNode) -> None:
    both_are_there = asyncio.Event()
    broken: list[Step] = [both_are_there, Refusal(grpc.StatusCode.UNAVAILABLE, "died")]
    asked: list[str] = []

    def script_for(request: decode_pb2.DecodeRequest) -> list[Step]:
        asked.append(request.request_id)
        return broken if len(asked) <= 2 else GOOD

    nodes = [
        await start_node(PREFILL, "prefill-1"),
        await start_node(PREFILL, "prefill-2"),
        await start_node(DECODE, "decode-1", script_for=script_for),
        await start_node(DECODE, "decode-2", script_for=script_for),
    ]
    router = await start_router(*nodes, hedge_after_s=AFTER_S)
    running = asyncio.ensure_future(router.generate(text="hi", request_id="mine"))
    await until(lambda: len(asked) == 2, "both were asked")
    both_are_there.set()
    responses = await running
    assert _text(responses) == "ab"
    assert asked == ["mine", "mine~2", "mine~3"]
    assert responses[-1].finish.num_replacements == 1


async def test_a_client_that_leaves_ends_both(start_router: StartRouter, start_node: StartNode) -> None:
    scripts = Scripts([Hang()], [Hang()])
    nodes = await _two_of_each(start_node, scripts)
    router = await start_router(*nodes, hedge_after_s=AFTER_S)
    call = router.stub.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=20)
    await call.read()
    await until(lambda: len(scripts.asked) == 2, "both were asked")
    call.cancel()
    for node in nodes[2:]:
        await asyncio.wait_for(node.cancelled.wait(), 10)


def _hedges(*, burst: int = 100, **policy: float) -> Hedges:
    return Hedges(HedgePolicy(**policy), RetryBudget(ratio=0.0, burst=burst))


def test_a_percentile_of_what_others_waited_decides_once_enough_is_known() -> None:
    hedges = _hedges(percentile=0.9)
    for waited in range(1, MIN_KNOWN):
        hedges.note_first_token(float(waited))
        assert hedges.delay_s() is None
    hedges.note_first_token(float(MIN_KNOWN))
    assert hedges.delay_s() == 29.0
    # The latest ones count, so that a mesh that has become faster is hedged sooner.
    for _ in range(1000):
        hedges.note_first_token(0.5)
    assert hedges.delay_s() == 0.5


def test_a_percentile_below_the_least_wait_does_not_hurry() -> None:
    hedges = _hedges(percentile=0.5, after_s=2.0)
    assert hedges.delay_s() == 2.0
    for _ in range(MIN_KNOWN):
        hedges.note_first_token(0.1)
    assert hedges.delay_s() == 2.0
    for _ in range(1000):
        hedges.note_first_token(3.0)
    assert hedges.delay_s() == 3.0


def test_hedges_and_retries_share_one_budget() -> None:
    budget = RetryBudget(ratio=0.0, burst=2)
    hedges = Hedges(HedgePolicy(after_s=1.0), budget)
    assert budget.try_spend()
    assert hedges.try_begin()
    assert not hedges.try_begin()
    assert (hedges.num_begun, budget.num_spent) == (1, 2)


@pytest.mark.parametrize(
    ("values", "words"), [({"after_s": -1.0}, "after_s: -1.0 given"), ({"percentile": 1.0}, "percentile: 1.0 given")]
)
def test_limits_that_make_no_sense_are_refused(values: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HedgePolicy(**values)
