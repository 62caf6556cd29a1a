"""`pdmesh trace` at a terminal and in a pipe, against the service of a router. PDMESH_UPDATE_GOLDEN=1 draws anew."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc, traces_pb2_grpc
from support.certificates import MeshAuthority
from typer.testing import CliRunner, Result

from node_runtime.config import NodeConfig
from node_runtime.errors import Unauthenticated
from node_runtime.rpc import ANYBODY, Caller, Credentials, NodeService, RpcServer
from pdmesh_cli.main import app
from pdmesh_cli.trace_lines import RequestLines
from router_node.trace_service import TraceService
from router_node.trace_store import AttributeValue, Span, TraceStore
from router_node.trace_summary import summary_of

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
BEGAN_NS = 1_700_000_000_000_000_000
MS = 1_000_000
NO_TRACE = "no trace has come yet; the router and its nodes send theirs when a request has ended\n"


def span(
    span_id: int,
    name: str,
    node: str,
    begin_ms: float,
    end_ms: float,
    *,
    parent: int = 0,
    trace_id: str = TRACE_ID,
    error: str = "",
    **attributes: AttributeValue,
) -> Span:
    return Span(
        trace_id=trace_id,
        span_id=f"{span_id:016x}",
        parent_span_id=f"{parent:016x}" if parent else "",
        name=name,
        node=node,
        start_ns=BEGAN_NS + round(begin_ms * MS),
        end_ns=BEGAN_NS + round(end_ms * MS),
        attributes={key.replace("__", "."): value for key, value in attributes.items()},
        error=error,
    )


WHOLE = (
    span(
        1,
        "chat tiny",
        "router",
        0,
        1812.4,
        pdmesh__request_id="mine",
        pdmesh__prefill_node="prefill-0",
        pdmesh__decode_node="decode-0",
        gen_ai__usage__input_tokens=1200,
        gen_ai__usage__output_tokens=8,
        pdmesh__cached_tokens__prefill_device=1024,
        pdmesh__time_to_first_token_ms=612.3,
        pdmesh__tenant="team-a",
        pdmesh__adapter="french",
    ),
    span(
        2,
        "pdmesh.place",
        "router",
        1.3,
        1.4,
        parent=1,
        pdmesh__prefill_node="prefill-0",
        pdmesh__decode_node="decode-0",
        pdmesh__place__policy="cache_aware",
        pdmesh__place__reason="the longest prefix is cached there",
        pdmesh__place__candidates=4,
        pdmesh__place__queue_ms=95.2,
        pdmesh__place__compute_ms=401.5,
        pdmesh__place__transfer_ms=33.0,
        pdmesh__place__decode_ms=0.0,
        pdmesh__place__prefill_cached_tokens=1024,
        pdmesh__place__decode_cached_tokens=0,
        pdmesh__place__runners_up="prefill-1 > decode-0: 812.0 ms, 0 cached",
    ),
    span(
        3,
        "pdmesh.failed_attempt",
        "router",
        1.4,
        3,
        parent=1,
        pdmesh__attempt=1,
        pdmesh__prefill_node="prefill-1",
        pdmesh__decode_node="decode-1",
        pdmesh__resumed_tokens=3,
        error__type="UNAVAILABLE",
    ),
    span(4, "pdmesh.decode.request", "decode-0", 3, 1811, parent=1),
    span(
        5,
        "pdmesh.transfer",
        "prefill-0",
        240,
        610,
        parent=4,
        pdmesh__transfer__bytes=3 * 2**20,
        pdmesh__transfer__runs=12,
        pdmesh__transfer__blocks=34,
        pdmesh__transfer__blocks_of__full=30,
        pdmesh__transfer__blocks_of__sliding=4,
        pdmesh__transfer__busy_ms=60.0,
        pdmesh__transfer__bytes_per_s=50 * 2.0**20,
    ),
)
FAILED = span(
    9,
    "chat tiny",
    "router",
    50,
    62.5,
    trace_id="c0ffee" + "0" * 26,
    error="max_live_requests: \x1b[31m8 run",
    error__type="QueueFull",
    pdmesh__request_id="refused",
)


class OnlyTokenOfOps:
    """Whoever shows it may call everything."""

    def admit(self, method: str, credentials: Credentials) -> Caller:
        if credentials.authorization != "Bearer ops":
            raise Unauthenticated("a token is required")
        return ANYBODY


async def serving(store: TraceStore | None, **settings: object) -> tuple[RpcServer, str]:
    server = RpcServer(NodeConfig(node_id="router"), **settings)  # type: ignore[arg-type]
    server.add(traces_pb2_grpc.add_TracesServicer_to_server, TraceService(store))
    return server, f"127.0.0.1:{await server.start()}"


@pytest.fixture
async def router() -> AsyncIterator[tuple[TraceStore, str]]:
    store = TraceStore()
    await store.add((*WHOLE, FAILED))
    server, address = await serving(store)
    yield store, address
    await server.stop(grace_s=0)


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments], env={"PDMESH_ROUTER": "", "TZ": "UTC", **environment})


async def trace(*arguments: str, **environment: str) -> Result:
    return await asyncio.to_thread(invoke, *arguments, **environment)


async def test_the_last_requests_are_listed_with_what_they_cost(router: tuple[TraceStore, str]) -> None:
    _, address = router
    result = await trace("--router", address)
    assert result.exit_code == 0, result.output
    heading, newest, oldest = result.stdout.splitlines()
    assert heading.split() == ["started", "request", "trace", "status", "prompt", "answer", "1st", "token", "total"]
    assert newest.split()[2:] == ["refused", "c0ffee000000", "QueueFull", "0", "0", "-", "12.5", "ms"]
    assert oldest.split()[2:] == [
        *("mine", TRACE_ID[:12], "ok", "1,200", "8"),
        *("612.3", "ms", "1,812.4", "ms"),
    ]
    assert len((await trace("--router", address, "-n", "1")).stdout.splitlines()) == 2


async def test_a_trace_is_drawn_with_its_placement_its_transfer_and_what_went_wrong(
    router: tuple[TraceStore, str],
) -> None:
    _, address = router
    golden = Path(__file__).parent / "golden" / "trace_100.txt"
    for name in ("mine", TRACE_ID, TRACE_ID[:8]):
        result = await trace(name, "--router", address)
        assert result.exit_code == 0, result.output
        drawn = "\n".join(line.rstrip() for line in result.stdout.splitlines()) + "\n"
        if os.environ.get("PDMESH_UPDATE_GOLDEN"):
            golden.write_text(drawn, encoding="utf-8")
        assert drawn == golden.read_text(encoding="utf-8")


async def test_what_a_message_does_to_a_terminal_is_not_done(router: tuple[TraceStore, str]) -> None:
    _, address = router
    result = await trace("refused", "--router", address)
    assert "failed: max_live_requests: \N{REPLACEMENT CHARACTER}[31m8 run" in result.stdout
    assert "\x1b" not in result.stdout


async def test_machines_get_json(router: tuple[TraceStore, str]) -> None:
    _, address = router
    lines = [json.loads(line) for line in (await trace("--json", "--router", address)).stdout.splitlines()]
    assert [(line["request_id"], line["status"], line["first_token_ms"]) for line in lines] == [
        ("refused", "QueueFull", None),
        ("mine", "ok", 612.3),
    ]
    whole = json.loads((await trace("mine", "--json", "--router", address)).stdout)
    assert whole["trace_id"] == TRACE_ID
    assert [each["name"] for each in whole["spans"]] == [each.name for each in WHOLE]
    assert whole["spans"][4]["attributes"]["pdmesh.transfer.bytes"] == 3 * 2**20
    assert whole["spans"][4]["duration_ms"] == 370.0


async def test_requests_are_followed_as_they_end_until_ctrl_c(router: tuple[TraceStore, str]) -> None:
    store, address = router
    command = [sys.executable, "-m", "pdmesh_cli.main", "trace", "--follow", "--json", "--router", address]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    heard = asyncio.ensure_future(process.stdout.readline())
    number = 100
    while not heard.done():
        number += 1
        await store.add([span(1, "chat tiny", "router", 0, 1, trace_id=f"{number:032x}", pdmesh__request_id="new")])
        await asyncio.wait((heard,), timeout=0.1)
    assert json.loads(heard.result())["request_id"] == "new"
    process.send_signal(2)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, errors.decode()) == (130, "interrupted\n")


async def test_a_reader_that_has_read_enough_is_no_failure(router: tuple[TraceStore, str]) -> None:
    store, address = router
    await store.add(span(1, "chat tiny", "router", 0, 1, trace_id=f"{number:032x}") for number in range(200))
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "pdmesh_cli.main", "trace", "-n", "200", "--router", address]
    with os.fdopen(writing, "wb") as gone:
        process = await asyncio.create_subprocess_exec(*command, stdout=gone, stderr=subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert errors == b""


async def test_an_id_that_is_not_held_and_one_together_with_follow_are_one_line(
    router: tuple[TraceStore, str],
) -> None:
    _, address = router
    result = await trace("nobody", "--router", address)
    assert result.exit_code == 1
    assert result.stderr == 'pdmesh: NOT_FOUND: id: no trace or request "nobody" is held; only the newest are kept\n'
    result = await trace("mine", "--follow", "--router", address)
    assert result.exit_code == 2
    assert result.stderr == "pdmesh: --follow: shows all requests, and goes without an id\n"


@pytest.mark.parametrize("arguments", [(), ("mine",), ("--follow",)])
async def test_a_router_that_keeps_none_says_what_to_do(arguments: tuple[str, ...]) -> None:
    server, address = await serving(None)
    result = await trace(*arguments, "--router", address)
    await server.stop(grace_s=0)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "keeps no traces; start it with --keep-traces 256" in result.stderr


async def test_an_older_router_is_told_from_one_that_keeps_none() -> None:
    class Reporter:
        def info(self) -> mesh_pb2.NodeInfo:
            return mesh_pb2.NodeInfo(node_id="router")

    server = RpcServer(NodeConfig(node_id="router"))
    server.add(mesh_pb2_grpc.add_NodeServicer_to_server, NodeService(Reporter(), server, [].append))  # type: ignore[arg-type]
    address = f"127.0.0.1:{await server.start()}"
    result = await trace("--router", address)
    await server.stop(grace_s=0)
    assert result.stderr == (
        f"pdmesh: UNIMPLEMENTED: {address} shows no traces: it is no router, or one of an older release\n"
    )


async def test_the_token_goes_with_the_question(tmp_path: Path) -> None:
    server, address = await serving(TraceStore(), access=OnlyTokenOfOps())
    (tmp_path / "token").write_text("ops\n")
    refused = await trace("--router", address)
    result = await trace("--router", address, "--token-file", str(tmp_path / "token"))
    await server.stop(grace_s=0)
    assert refused.stderr == "pdmesh: UNAUTHENTICATED: a token is required\n"
    assert (result.exit_code, result.stdout) == (0, NO_TRACE)


async def test_over_tls_the_certificate_of_an_operator_is_shown(tmp_path: Path) -> None:
    authority = MeshAuthority(tmp_path)
    server = RpcServer(NodeConfig.model_validate({"node_id": "router", **authority.settings("router")}))
    server.add(traces_pb2_grpc.add_TracesServicer_to_server, TraceService(TraceStore()))
    address = f"127.0.0.1:{await server.start()}"
    certificate, key = authority.issue("operator")
    trusting = ("--tls-ca", str(authority.path), "--tls-server-name", "pdmesh.internal")
    result = await trace("--router", address, *trusting, "--tls-cert", str(certificate), "--tls-key", str(key))
    await server.stop(grace_s=0)
    assert (result.exit_code, result.stdout) == (0, NO_TRACE), result.stderr


@pytest.mark.parametrize("width", [80, 96, 100, 112, 200])
def test_lines_fit_a_terminal(width: int) -> None:
    """With the longest numbers and the name of an error that there are."""
    lines = RequestLines(width)
    long = span(
        1,
        "chat tiny",
        "router",
        0,
        999_999,
        pdmesh__request_id="x" * 128,
        gen_ai__usage__input_tokens=131_072,
        gen_ai__usage__output_tokens=131_072,
        pdmesh__time_to_first_token_ms=9_999.9,
        error="too late",
        error__type="DeadlineExceeded",
    )
    shown = [lines.heading().plain, lines.line(summary_of(long)).plain]
    assert len({len(line) for line in shown}) == 1
    assert len(shown[0]) <= width
    assert ("trace" in shown[0]) is (width >= 96)
    assert shown[1].count("…") == 1, "the id is cut off, and says so"
    today = replace(long, start_ns=time.time_ns(), end_ns=time.time_ns())
    assert re.match(r"\d\d:\d\d:\d\d   ", lines.line(summary_of(today)).plain)
