"""The HTTP server itself: clients that leave, drains, traces, certificates, and requests that are none."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

import openai
import pytest
from pdmesh.v1 import mesh_pb2
from support.certificates import MeshAuthority
from unit.router_node.fakes import (
    FakeNode,
    Hang,
    RunningRouter,
    StartRouter,
    finish_event,
    tokens_event,
)
from unit.router_node.openai_api.clients import HI, ask_raw, client_of, post

from node_runtime.errors import PortInUse
from router_node.openai_api.server import MAX_HEADER_BYTES


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request_on_the_nodes(
    router: RunningRouter, client: openai.AsyncOpenAI, decode: FakeNode, stream: bool
) -> None:
    decode.script = [tokens_event("a"), Hang()]
    headers = {"x-request-id": "mine"}
    call = client.chat.completions.create(model="tiny", messages=HI, stream=stream, extra_headers=headers)
    if stream:
        answer = await call
        chunks = aiter(answer)
        await anext(chunks)
        await answer.close()
    else:
        waiting = asyncio.create_task(call)
        while not decode.requests:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
    await decode.cancelled.wait()
    while (await router.node.GetNodeStatus(mesh_pb2.GetNodeStatusRequest())).num_running_requests:
        await asyncio.sleep(0.01)
    decode.script = [tokens_event("b"), finish_event()]
    again = await client.chat.completions.create(model="tiny", messages=HI, extra_headers=headers)
    assert (again.id, again.choices[0].message.content) == ("chatcmpl-mine", "b")


async def test_a_drain_finishes_what_runs_and_refuses_the_rest(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    release = asyncio.Event()
    decode.script = [tokens_event("a"), release, tokens_event("b"), finish_event()]
    router = await start_router(prefill, decode, http="127.0.0.1:0", drain_grace_s=20)
    async with client_of(router) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        chunks = aiter(stream)
        texts = [(await anext(chunks)).choices[0].delta.content for _ in range(2)]
        stopping = asyncio.create_task(router.router.stop())
        status = 200
        while status != 503:
            status, _ = await ask_raw(router, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        with pytest.raises(openai.InternalServerError, match="draining"):
            await client.chat.completions.create(model="tiny", messages=HI)
        release.set()
        texts += [chunk.choices[0].delta.content async for chunk in chunks]
        assert texts == ["", "a", "b", None]
        await stopping


async def test_the_callers_trace_and_request_id_go_on_to_the_nodes(
    client: openai.AsyncOpenAI, decode: FakeNode
) -> None:
    trace = "0123456789abcdef0123456789abcdef"
    headers = {"traceparent": f"00-{trace}-0123456789abcdef-01", "x-request-id": "mine"}
    answer = await client.chat.completions.with_raw_response.create(model="tiny", messages=HI, extra_headers=headers)
    assert trace in str(decode.metadata[0]["traceparent"])
    assert decode.requests[0].request_id == "mine"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["date"].endswith("GMT")


async def test_where_clients_must_show_a_certificate_those_without_one_hear_nothing(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path
) -> None:
    authority = MeshAuthority(tmp_path)
    router = await start_router(
        prefill, decode, http="127.0.0.1:0", client_certificates=True, **authority.settings("router")
    )
    host, port = router.router.http_address.split(":")

    async def answer(context: ssl.SSLContext) -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
        try:
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()

    context = ssl.create_default_context(cafile=str(authority.path))
    # Whether the client sees the alert or the end of the connection first is chance.
    with suppress(ssl.SSLError, ConnectionError):
        assert await answer(context) == b""
    context.load_cert_chain(*authority.issue("operator"))
    assert (await answer(context)).startswith(b"HTTP/1.1 ")


async def test_with_a_certificate_it_is_https_and_takes_a_new_one_when_that_comes(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path
) -> None:
    authority = MeshAuthority(tmp_path)
    router = await start_router(prefill, decode, http="127.0.0.1:0", **authority.settings("router"))
    host, port = router.router.http_address.split(":")
    trusting = ssl.create_default_context(cafile=str(authority.path))

    async def shown() -> object:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting, server_hostname="localhost")
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 ")
        certificate = writer.get_extra_info("peercert")
        writer.close()
        return certificate["serialNumber"]

    first = await shown()
    assert await shown() == first
    authority.issue("router")
    assert await shown() != first
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError, IndexError)):
        await ask_raw(router, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post("/v1/completions", b'{"prompt": ', "content-type: application/json"), 400),
        (post("/v1/completions", b"[" * 100_000, "content-type: application/json"), 400),
        (post("/v1/completions", b'{"prompt": "\xff"}', "content-type: application/json"), 400),
        (post("/v1/completions", b'{"prompt": "a"}', "content-type: text/plain"), 415),
        (post("/v1/completions", b" " * 5000, "content-type: application/json"), 413),
        (post("/v1/completions", b"{}", "content-type: application/json", "x-request-id: " + "a" * 129), 400),
        (post("/v1/nothing", b"{}", "content-type: application/json"), 404),
        (post("/v1/completions/", b"{}", "content-type: application/json"), 404),
        (b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 405),
    ],
)
async def test_a_request_that_breaks_the_rules_of_http_is_refused_in_the_shape_of_the_api(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, request_bytes: bytes, status: int
) -> None:
    router = await start_router(prefill, decode, http="127.0.0.1:0", max_message_bytes=4096)
    if b"[[[" in request_bytes:
        router = await start_router(prefill, decode, http="127.0.0.1:0")
    got, body = await ask_raw(router, request_bytes)
    assert got == status
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]
    assert not decode.requests


async def test_an_http_port_in_use_is_named(
    start_router: StartRouter, router: RunningRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    with pytest.raises(PortInUse, match=router.router.http_address):
        await start_router(prefill, decode, http=router.router.http_address)


async def test_headers_beyond_the_bound_are_refused_before_they_are_kept(router: RunningRouter) -> None:
    status, _ = await ask_raw(router, post("/v1/completions", b"{}", "x-much: " + "a" * MAX_HEADER_BYTES))
    assert status == 431
