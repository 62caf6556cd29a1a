"""The live page: what it asks for, who may see it, and the page itself in a browser where there is one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from pdmesh.v1 import mesh_pb2
from unit.router_node.fakes import FakeNode, RunningRouter, StartRouter

from node_runtime.rpc import Telemetry, current_context
from router_node.trace_summary import KIND_BY_NAME

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
MS = 1_000_000
BEGAN_NS = 1_800_000_000_000 * MS


@dataclass(frozen=True, slots=True)
class Answer:
    status_code: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


async def get(router: RunningRouter, path: str, token: str = "") -> Answer:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    asked = urllib.request.Request(f"http://{router.router.http_address}{path}", headers=headers)
    return await asyncio.to_thread(_fetch, asked)


def _fetch(asked: urllib.request.Request) -> Answer:
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return Answer(answer.status, answer.headers, answer.read().decode())
    except urllib.error.HTTPError as refusal:
        return Answer(refusal.code, refusal.headers, refusal.read().decode())


@pytest.fixture
async def router(start_router: StartRouter, prefill: FakeNode, decode: FakeNode) -> RunningRouter:
    return await start_router(prefill, decode, http="127.0.0.1:0", served_model_name="tiny", keep_traces=5)


async def send_trace(router: RunningRouter, *, error: str = "") -> str:
    """A request's trace as nodes send it to this router; its id."""
    telemetry = Telemetry.setup("pdmesh-router", "router-1", router.router.address)
    attributes = {"pdmesh.request_id": "mine", "pdmesh.decode_node": "decode-1", "gen_ai.usage.output_tokens": 7}
    with telemetry.span("chat tiny", attributes) as span:
        with telemetry.span("pdmesh.decode.request"):
            telemetry.record_span("pdmesh.decode.generate", BEGAN_NS, BEGAN_NS + 25 * MS, current_context())
        if error:
            span.fail("NoUsableNode", error)
    await asyncio.to_thread(telemetry.shutdown)
    return span.trace_id


async def test_the_bare_address_leads_to_the_page(router: RunningRouter) -> None:
    page = await get(router, "/ui")
    assert (await get(router, "/")).text == page.text


async def test_the_page_loads_nothing_from_elsewhere(router: RunningRouter) -> None:
    answer = await get(router, "/ui")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in answer.text


async def test_the_state_tells_of_every_node_and_what_it_does(router: RunningRouter) -> None:
    state = (await get(router, "/ui/state")).json()
    assert state["model"] == "tiny"
    assert state["router"]["is_serving"] is True
    by_role = {node["role"]: node for node in state["nodes"]}
    assert by_role.keys() == {"prefill", "decode"}
    assert by_role["decode"]["node_id"] == "decode-1"
    assert by_role["decode"]["state"] == "ready"
    assert by_role["decode"]["num_running"] == 0


def busy(prefill: FakeNode) -> mesh_pb2.NodeStatus:
    """Of a decode node with a link to `prefill` and an arena of two groups."""
    groups = [
        mesh_pb2.GroupStatus(group_id="full", lcm_blocks=30, cached_lcm_blocks=10, taken_blocks=55),
        mesh_pb2.GroupStatus(group_id="sliding", lcm_blocks=12, cached_lcm_blocks=12, taken_blocks=4),
    ]
    return mesh_pb2.NodeStatus(
        num_waiting_requests=4,
        num_handoffs=3,
        arena=mesh_pb2.ArenaStatus(
            total_lcm_blocks=100,
            empty_lcm_blocks=57,
            active_lcm_blocks=20,
            cached_lcm_blocks=22,
            quarantined_lcm_blocks=1,
            groups=groups,
        ),
        peers=[mesh_pb2.PeerStatus(address=prefill.address, state="ready", data_plane="shm")],
    )


async def test_the_state_tells_of_queues_handoffs_links_and_each_group_of_an_arena(
    router: RunningRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    decode.gauges = busy(prefill)
    state = (await get(router, "/ui/state")).json()
    (shown,) = (node for node in state["nodes"] if node["role"] == "decode")
    assert (shown["num_waiting"], shown["num_handoffs"]) == (4, 3)
    arena = shown["arena"]
    assert [arena[name] for name in ("total", "empty", "active", "cached", "quarantined")] == [100, 57, 20, 22, 1]
    assert arena["groups"] == [
        {"group_id": "full", "lcm_blocks": 30, "cached_lcm_blocks": 10, "taken_blocks": 55},
        {"group_id": "sliding", "lcm_blocks": 12, "cached_lcm_blocks": 12, "taken_blocks": 4},
    ]
    (peer,) = shown["peers"]
    assert (peer["address"], peer["state"], peer["data_plane"]) == (prefill.address, "ready", "shm")


async def test_a_node_that_is_gone_is_shown_with_the_reason(router: RunningRouter, decode: FakeNode) -> None:
    await decode.stop()
    state = (await get(router, "/ui/state")).json()
    gone = next(node for node in state["nodes"] if node["role"] == "decode")
    assert "num_running" not in gone
    assert "cannot connect" in gone["error"]


async def test_a_trace_that_nodes_sent_is_listed_and_shown_as_a_tree(router: RunningRouter) -> None:
    trace_id = await send_trace(router)
    (line,) = (await get(router, "/ui/state")).json()["traces"]
    assert line["trace_id"] == trace_id
    assert (line["request_id"], line["decode_node"], line["output_tokens"]) == ("mine", "decode-1", 7)
    assert [(phase["kind"], phase["end_ms"] - phase["start_ms"]) for phase in line["phases"]] == [("decode", 25.0)]
    spans = (await get(router, f"/ui/traces/{trace_id}")).json()["spans"]
    assert sorted((span["depth"], span["name"]) for span in spans) == [
        (0, "chat tiny"),
        (1, "pdmesh.decode.request"),
        (2, "pdmesh.decode.generate"),
    ]
    assert next(span for span in spans if span["depth"] == 0)["attributes"]["pdmesh.request_id"] == "mine"


async def test_only_the_newest_traces_are_kept(router: RunningRouter) -> None:
    sent = [await send_trace(router) for _ in range(7)]
    listed = [line["trace_id"] for line in (await get(router, "/ui/state")).json()["traces"]]
    assert listed == sent[:1:-1]
    assert (await get(router, f"/ui/traces/{sent[0]}")).status_code == 404


async def export(router: RunningRouter, *spans: Span) -> None:
    """As a node would that has lost its mind."""
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])])
    async with grpc.aio.insecure_channel(router.router.address) as channel:
        await channel.unary_unary(EXPORT)(request.SerializeToString(), timeout=20)


async def test_numbers_that_are_none_are_shown_as_text(router: RunningRouter) -> None:
    attributes = [
        KeyValue(key=key, value=AnyValue(double_value=value))
        for key, value in (("pdmesh.x", math.nan), ("gen_ai.usage.output_tokens", math.inf))
    ]
    await export(router, Span(trace_id=b"t" * 16, span_id=b"s" * 8, name="chat tiny", attributes=attributes))
    assert (await get(router, "/ui/state")).status_code == 200
    (span,) = (await get(router, f"/ui/traces/{(b't' * 16).hex()}")).json()["spans"]
    assert span["attributes"]["pdmesh.x"] == "nan"


async def test_spans_that_enclose_one_another_are_shown_all_the_same(router: RunningRouter) -> None:
    common = {"trace_id": b"t" * 16, "name": "a"}
    spans = [
        Span(span_id=b"1" * 8, parent_span_id=b"2" * 8, **common),
        Span(span_id=b"2" * 8, parent_span_id=b"1" * 8, **common),
        Span(span_id=b"3" * 8, parent_span_id=b"3" * 8, **common),
    ]
    await export(router, *spans)
    shown = (await get(router, f"/ui/traces/{(b't' * 16).hex()}")).json()["spans"]
    assert [span["depth"] for span in shown] == [0, 1, 0]


async def test_a_failed_request_says_why(router: RunningRouter) -> None:
    await send_trace(router, error="no prefill node is usable")
    (line,) = (await get(router, "/ui/state")).json()["traces"]
    assert line["error"] == "no prefill node is usable"


async def test_a_router_that_keeps_no_traces_says_so_and_takes_none(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    router = await start_router(prefill, decode, http="127.0.0.1:0")
    await send_trace(router)
    assert (await get(router, "/ui/state")).json()["traces"] is None
    assert (await get(router, "/ui/traces/00")).status_code == 404


def write_tenants(path: Path) -> str:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("client", "operator")}
    tenants = [
        {"name": name, "token_sha256": [digest], "is_operator": name == "operator"} for name, digest in digests.items()
    ]
    path.write_text(json.dumps({"tenants": tenants}))
    return str(path)


async def test_with_tenants_only_operators_see_the_mesh(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path
) -> None:
    router = await start_router(
        prefill, decode, http="127.0.0.1:0", keep_traces=5, tenants=write_tenants(tmp_path / "tenants.yaml")
    )
    for path in ("/ui/state", "/ui/traces/00"):
        assert (await get(router, path)).status_code == 401
        assert (await get(router, path, "client")).status_code == 403
    assert (await get(router, "/ui/state", "operator")).status_code == 200
    assert (await get(router, "/ui")).status_code == 200


@pytest.fixture
async def browser_page() -> Any:
    """A page of a headless Chromium, and what it complained about."""
    playwright = pytest.importorskip("playwright.async_api", reason="no playwright: make setup-browser")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on this machine: make setup-browser")
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page, complaints
        await browser.close()


async def test_a_browser_shows_nodes_requests_and_the_waterfall_of_one(
    router: RunningRouter, prefill: FakeNode, decode: FakeNode, browser_page: Any
) -> None:
    page, complaints = browser_page
    decode.gauges = busy(prefill)
    await send_trace(router)
    await page.goto(f"http://{router.router.http_address}/ui")
    await page.wait_for_selector(".node", timeout=30_000)
    assert sorted(await page.locator(".node b").all_text_contents()) == ["decode-1", "prefill-1"]
    assert await page.locator(".node .good").count() == 2
    groups = page.locator(".node .group")
    assert [text.split()[0] for text in await groups.all_inner_texts()] == ["full", "sliding"]
    assert await groups.last.locator(".bar").get_attribute("title") == "cached 12, empty 88"
    assert await page.locator("#links text").all_text_contents() == ["shm"]
    await page.locator("#requests .row").click()
    await page.wait_for_selector("#spans .row")
    assert await page.locator("#spans .row").count() == 3
    await page.locator("#spans .row").first.click()
    assert "pdmesh.request_id = mine" in await page.locator("#spans pre").first.text_content()
    await decode.stop()
    await page.wait_for_selector(".node .bad", timeout=30_000)
    assert complaints == []


async def test_a_browser_asks_for_the_token_of_an_operator(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path, browser_page: Any
) -> None:
    page, complaints = browser_page
    router = await start_router(prefill, decode, http="127.0.0.1:0", tenants=write_tenants(tmp_path / "tenants.yaml"))
    await page.goto(f"http://{router.router.http_address}/ui")
    await page.fill("input[aria-label=token]", "operator", timeout=30_000)
    await page.click("#note button")
    await page.wait_for_selector(".node", timeout=30_000)
    assert complaints == []


def test_every_kind_of_the_page_has_a_colour() -> None:
    page = files("router_node.ui").joinpath("page.html").read_text(encoding="utf-8")
    for kind in (*KIND_BY_NAME.values(), "envelope", "active", "cached", "quarantined", "empty"):
        assert f"--{kind}:" in page


async def test_looks_of_many_are_one_question_to_each_node(router: RunningRouter, decode: FakeNode) -> None:
    asked = 0
    answer = decode.GetNodeStatus

    async def counted(request: mesh_pb2.GetNodeStatusRequest, context: object) -> mesh_pb2.NodeStatus:
        nonlocal asked
        asked += 1
        return await answer(request, context)

    decode.GetNodeStatus = counted  # type: ignore[method-assign]
    await asyncio.gather(*(get(router, "/ui/state") for _ in range(5)))
    assert asked <= 1
