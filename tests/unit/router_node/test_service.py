"""The router end to end: a real server in front of compute nodes that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pdmesh.v1 import decode_pb2, inference_pb2, mesh_pb2
from support.fake_mesh import until
from support.prometheus import scrape
from unit.router_node.fakes import (
    EOS,
    FakeNode,
    Hang,
    Refusal,
    StartNode,
    StartRouter,
    admitted_event,
    finish_event,
    tokens_event,
)

from node_runtime.rpc import Metrics, Telemetry

DECODE, PREFILL, FUSED = mesh_pb2.NODE_ROLE_DECODE, mesh_pb2.NODE_ROLE_PREFILL, mesh_pb2.NODE_ROLE_FUSED
STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH


def _kinds(responses: Sequence[inference_pb2.GenerateResponse]) -> list[str | None]:
    return [response.WhichOneof("event") for response in responses]


def _text(responses: Sequence[inference_pb2.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


async def test_a_stream_is_a_placement_then_deltas_then_one_finish(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [
        admitted_event(),
        tokens_event(b"a\xc3"),
        tokens_event(b"\xa9"),
        finish_event(STOP, matched_token_id=EOS),
    ]
    router = await start_router(prefill, decode)
    responses = await router.generate(text="hi", request_id="mine", max_tokens=5)
    assert _kinds(responses) == ["placement", "delta", "delta", "finish"]
    placement, first, second, finish = responses
    assert (placement.placement.request_id, placement.placement.decode_node) == ("mine", "decode-1")
    assert placement.placement.prefill_node == "prefill-1"
    assert (first.delta.text, second.delta.text) == ("a", "é")
    assert [token.token_id for token in first.delta.tokens] == [0x61, 0xC3]
    assert (finish.finish.reason, finish.finish.matched_token_id) == (STOP, EOS)
    assert finish.finish.usage.cached.prefill_device == 1
    assert finish.finish.timings.transfer_ms == 1.5
    (request,) = decode.requests
    assert (request.request_id, bytes(request.token_ids), request.max_tokens) == ("mine", b"hi", 5)
    assert request.prefill_address == prefill.address


async def test_a_fused_node_is_asked_without_a_prefill_address(
    start_router: StartRouter, start_node: StartNode
) -> None:
    fused = await start_node(FUSED, "fused-1", script=[tokens_event("x"), finish_event()])
    router = await start_router(fused)
    placement, *rest = await router.generate(text="hi")
    assert placement.placement.prefill_node == ""
    assert len(placement.placement.request_id) == 32
    assert _text(rest) == "x"
    assert fused.requests[0].prefill_address == ""


async def test_a_stop_string_ends_the_stream_and_cancels_the_decode_node(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [admitted_event(), tokens_event("one E"), tokens_event("NDtwo"), Hang()]
    router = await start_router(prefill, decode)
    responses = await router.generate(text="hi", stop=["END", "never"])
    finish = responses[-1].finish
    assert _text(responses) == "one "
    assert (finish.reason, finish.matched_stop) == (STOP, "END")
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (2, 7)
    assert finish.usage.cached == inference_pb2.CachedTokens(prefill_device=1)
    assert (finish.timings.prefill_compute_ms, finish.timings.transfer_ms) == (2.5, 1.5)
    await decode.cancelled.wait()


async def test_what_was_cached_stays_unknown_when_the_decode_node_never_said_it(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [tokens_event("one END"), Hang()]
    router = await start_router(prefill, decode)
    finish = (await router.generate(text="hi", stop=["END"]))[-1].finish
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (2, 7)
    assert not finish.usage.HasField("cached")


async def test_an_event_that_this_release_does_not_know_is_not_a_delta(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [decode_pb2.DecodeResponse(), tokens_event("x"), finish_event()]
    router = await start_router(prefill, decode)
    assert _kinds(await router.generate(text="hi")) == ["placement", "delta", "finish"]


async def test_text_that_might_have_become_a_stop_string_is_delivered_at_the_end(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [tokens_event("one EN"), finish_event(LENGTH)]
    router = await start_router(prefill, decode)
    responses = await router.generate(text="hi", stop=["END"])
    assert _text(responses) == "one EN"
    assert responses[-1].finish.reason == LENGTH


async def test_a_client_that_cancels_cancels_the_decode_node(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [tokens_event("a"), Hang()]
    router = await start_router(prefill, decode)
    call = router.stub.Generate(inference_pb2.GenerateRequest(text="hi", request_id="mine"), timeout=20)
    assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["placement", "delta"]
    call.cancel()
    await decode.cancelled.wait()
    decode.script = [finish_event()]
    assert _kinds(await router.generate(text="hi", request_id="mine")) == ["placement", "finish"]


async def test_a_deadline_that_passes_ends_the_request_on_the_decode_node(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [Hang()]
    router = await start_router(prefill, decode)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in router.stub.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=0.3):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await decode.cancelled.wait()


async def test_a_live_request_id_is_refused_and_the_first_request_unharmed(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [tokens_event("a"), Hang()]
    router = await start_router(prefill, decode)
    call = router.stub.Generate(inference_pb2.GenerateRequest(text="hi", request_id="mine"), timeout=20)
    await call.read()
    code, message = await router.refusal(text="hi", request_id="mine")
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "mine" in message
    assert (await call.read()).delta.text == "a"
    call.cancel()


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt.text"),
        ({"text": "x" * 64}, grpc.StatusCode.INVALID_ARGUMENT, "prompt: 64 tokens given, at most 63"),
        ({"text": "x", "model": "big"}, grpc.StatusCode.NOT_FOUND, '"big"'),
        ({"text": "x", "request_id": "é" * 65}, grpc.StatusCode.INVALID_ARGUMENT, "request_id: 130 bytes"),
        ({"text": "x", "max_tokens": 31}, grpc.StatusCode.RESOURCE_EXHAUSTED, "exceeds 30 tokens"),
    ],
)
async def test_a_refused_request_reaches_no_node(
    start_router: StartRouter,
    start_node: StartNode,
    fields: dict[str, object],
    code: grpc.StatusCode,
    words: str,
) -> None:
    fused = await start_node(FUSED, "fused-1", max_request_tokens=30)
    router = await start_router(fused)
    got, message = await router.refusal(**fields)
    assert got is code
    assert words in message
    assert not fused.requests
    assert (await router.node.GetNodeStatus(mesh_pb2.GetNodeStatusRequest())).num_running_requests == 0


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED],
)
async def test_a_refusal_of_the_decode_node_is_passed_on_with_the_names_of_the_nodes(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, code: grpc.StatusCode
) -> None:
    decode.script = [Refusal(code, "no such luck")]
    router = await start_router(prefill, decode)
    got, message = await router.refusal(text="hi")
    assert got is code
    for word in ("no such luck", "decode-1", "prefill-1", decode.address, prefill.address):
        assert word in message


async def test_a_decode_node_that_dies_mid_stream_makes_the_request_unavailable(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [tokens_event("a"), Hang()]
    router = await start_router(prefill, decode)
    call = router.stub.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=20)
    await call.read()
    await call.read()
    await decode.stop()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "decode-1" in (caught.value.details() or "")


async def test_a_stream_that_ends_without_a_finish_is_an_error(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [tokens_event("a")]
    router = await start_router(prefill, decode)
    code, message = await router.refusal(text="hi")
    assert code is grpc.StatusCode.INTERNAL
    assert "ended without a finish" in message


@pytest.mark.parametrize(
    ("setting", "fields"), [("max_prompt_bytes", {"text": "x" * 2000}), ("max_stop_bytes", {"stop": ["y" * 2000]})]
)
async def test_text_is_bounded_as_configured(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, setting: str, fields: dict[str, object]
) -> None:
    code, message = await (await start_router(prefill, decode, **{setting: 1024})).refusal(**{"text": "hi", **fields})
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "2000" in message
    assert "1024" in message


async def test_without_a_prefill_node_requests_are_unavailable_until_one_is_back(
    start_router: StartRouter, start_node: StartNode, decode: FakeNode
) -> None:
    prefill = await start_node(PREFILL, "prefill-1")
    router = await start_router(prefill, decode)
    await prefill.stop()
    decode.script = [Refusal(grpc.StatusCode.UNAVAILABLE, "the prefill node is gone")]
    # The first failure makes the router look, so that soon it knows by itself.
    while True:
        code, message = await router.refusal(text="hi")
        assert code is grpc.StatusCode.UNAVAILABLE
        if "no prefill node is usable" in message:
            break
    health = health_pb2_grpc.HealthStub(router.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
    while (await watch.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
        pass
    assert prefill.address in message
    decode.script = [tokens_event("a"), finish_event()]
    await start_node(PREFILL, "prefill-2", address=prefill.address)
    while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
        pass
    placement, *_ = await router.generate(text="hi")
    assert placement.placement.prefill_node == "prefill-2"


async def test_requests_spread_over_the_decode_nodes(
    start_router: StartRouter, start_node: StartNode, prefill: FakeNode
) -> None:
    script = [tokens_event("a"), finish_event()]
    nodes = [await start_node(DECODE, f"decode-{index}", script=script) for index in range(3)]
    router = await start_router(prefill, *nodes)
    await asyncio.gather(*(router.generate(text="hi") for _ in range(9)))
    assert [len(node.requests) for node in nodes] == [3, 3, 3]


async def test_a_node_of_another_model_gets_no_request(
    start_router: StartRouter, start_node: StartNode, prefill: FakeNode, decode: FakeNode
) -> None:
    other = await start_node(DECODE, "decode-2", vocab_size=99)
    router = await start_router(prefill, decode, other)
    for _ in range(3):
        await router.generate(text="hi")
    assert not other.requests
    status = await router.node.GetNodeStatus(mesh_pb2.GetNodeStatusRequest())
    (peer,) = (peer for peer in status.peers if peer.node_id == "decode-2")
    assert peer.state == "suspect"
    assert "vocab_size is 99" in peer.detail


async def test_the_longest_request_that_is_told_of_is_one_that_an_arena_can_hold(
    start_router: StartRouter, prefill: FakeNode, start_node: StartNode
) -> None:
    decode = await start_node(DECODE, "decode-1", max_request_tokens=40)
    router = await start_router(prefill, decode)
    (card,) = (await router.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert card.context_tokens == 40


async def test_the_router_describes_itself_and_its_model(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    router = await start_router(prefill, decode, served_model_name="tiny", node_id="router-1")
    (card,) = (await router.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (card.name, card.context_tokens, card.vocab_size) == ("tiny", 64, 257)
    info = await router.node.GetNodeInfo(mesh_pb2.GetNodeInfoRequest())
    assert (info.node_id, info.role, info.model) == ("router-1", mesh_pb2.NODE_ROLE_ROUTER, "")
    status = await router.node.GetNodeStatus(mesh_pb2.GetNodeStatusRequest())
    assert status.serving
    assert [(peer.node_id, peer.state) for peer in status.peers] == [("prefill-1", "ready"), ("decode-1", "ready")]
    health = health_pb2_grpc.HealthStub(router.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


async def test_the_callers_trace_goes_on_to_the_decode_node(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    router = await start_router(prefill, decode)
    header = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    call = router.stub.Generate(
        inference_pb2.GenerateRequest(text="hi"), timeout=20, metadata=(("traceparent", header),)
    )
    assert [response async for response in call]
    assert "0123456789abcdef0123456789abcdef" in str(decode.metadata[0]["traceparent"])


def _recording() -> tuple[Telemetry, InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry(provider), exporter


def _spans_by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_request_is_one_trace_that_the_placement_names_and_the_decode_node_continues(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    telemetry, exporter = _recording()
    router = await start_router(prefill, decode, telemetry=telemetry, served_model_name="tiny")
    sampling = inference_pb2.SamplingParams(temperature=0.5, top_k=7, seed=2**64 - 1)
    placement, *_ = await router.generate(
        text="hi", request_id="mine", max_tokens=5, sampling=sampling, stop=["x", "y"]
    )
    spans = _spans_by_name(exporter)
    root = spans["text_completion tiny"]
    assert root.context is not None
    assert f"{root.context.trace_id:032x}" == placement.placement.trace_id
    assert f"-{root.context.span_id:016x}-" in str(decode.metadata[0]["traceparent"])
    for child in ("pdmesh.tokenize", "pdmesh.place"):
        assert spans[child].parent == root.context
    attributes = dict(root.attributes or {})
    assert attributes["pdmesh.request_id"] == "mine"
    assert attributes["pdmesh.decode_node"] == "decode-1"
    asked = {name: value for name, value in attributes.items() if name.startswith("gen_ai.request.")}
    assert asked == {
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": str(2**64 - 1),
    }
    assert (attributes["gen_ai.response.id"], attributes["gen_ai.response.model"]) == ("mine", "tiny")
    assert (attributes["gen_ai.provider.name"], attributes["gen_ai.operation.name"]) == ("pdmesh", "text_completion")
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["pdmesh.cached_tokens.prefill_device"] == 1
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 1


@pytest.mark.parametrize("num_samples", [1, 2])
async def test_client_and_trace_are_told_the_same_time_to_the_first_token(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, num_samples: int
) -> None:
    """That since the request came, whatever the decode node says: it was asked later."""
    telemetry, exporter = _recording()
    router = await start_router(prefill, decode, telemetry=telemetry, served_model_name="tiny")
    responses = await router.generate(text="hi", max_tokens=5, num_samples=num_samples)
    told_ms = [response.finish.timings.time_to_first_token_ms for response in responses if response.HasField("finish")]
    assert len(told_ms) == num_samples
    assert min(told_ms) > 0
    root = _spans_by_name(exporter)["text_completion tiny"]
    assert root.attributes is not None
    assert root.attributes["pdmesh.time_to_first_token_ms"] == min(told_ms)


async def test_the_trace_of_a_request_that_was_cancelled_counts_the_tokens_that_it_had(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.script = [tokens_event("ab"), tokens_event("c"), Hang()]
    telemetry, exporter = _recording()
    router = await start_router(prefill, decode, telemetry=telemetry, served_model_name="tiny")
    call = router.stub.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=20)
    assert [(await call.read()).WhichOneof("event") for _ in range(3)] == ["placement", "delta", "delta"]
    call.cancel()
    await until(lambda: "text_completion tiny" in _spans_by_name(exporter), "the span of the request has ended")
    root = _spans_by_name(exporter)["text_completion tiny"]
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == 3


async def test_every_request_is_measured_by_its_outcome(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    metrics = Metrics.setup("pdmesh-router", "router-1", otlp_endpoint=None, is_scraped=True)
    address = metrics.serve("127.0.0.1", 0)
    router = await start_router(prefill, decode, telemetry=Telemetry(None, metrics), served_model_name="tiny")
    await router.generate(text="hi", max_tokens=5)
    await router.refusal(text="hi", max_tokens=5, model="another")
    samples = await asyncio.to_thread(scrape, address)
    metrics.shutdown()
    labels = 'gen_ai_operation_name="text_completion",gen_ai_provider_name="pdmesh",gen_ai_request_model="tiny"'
    assert samples[f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}}"] == 1
    assert samples[f"gen_ai_server_time_per_output_token_seconds_count{{{labels}}}"] == 1
    assert samples[f"gen_ai_server_request_duration_seconds_count{{{labels}}}"] == 1
    failed = f'error_type="UnknownModel",{labels}'
    assert samples[f"gen_ai_server_request_duration_seconds_count{{{failed}}}"] == 1
    assert samples['pdmesh_tokens_total{gen_ai_token_type="output"}'] == 2
    assert samples['pdmesh_cached_tokens_total{source="prefill_device"}'] == 1


async def test_a_refused_request_is_a_trace_with_an_error(start_router: StartRouter, decode: FakeNode) -> None:
    telemetry, exporter = _recording()
    router = await start_router(decode, telemetry=telemetry, prefill=("127.0.0.1:1",))
    code, message = await router.refusal(
        chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    )
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "no prefill node is usable" in message
    root = _spans_by_name(exporter)["chat tiny"]
    assert dict(root.attributes or {})["error.type"] == "NoUsableNode"
    assert not root.status.is_ok
