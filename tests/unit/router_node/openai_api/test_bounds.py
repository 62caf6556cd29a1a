"""What a client cannot make the HTTP server do: wait for ever, keep connections, or hold what nobody reads."""

from __future__ import annotations

import asyncio
import json
import ssl
from asyncio import TimerHandle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from support.certificates import MeshAuthority
from unit.router_node.fakes import FakeNode, StartRouter
from uvicorn.server import ServerState

from node_runtime.errors import NodeError, RequestCancelled
from router_node.openai_api import BodyLimits, BodyReader, ConnectionLimits, HttpServer
from router_node.openai_api.connections import bounded_by
from router_node.openai_api.failures import failure_for

GET = b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n"
WAIT_S = 20.0


@dataclass
class Pages:
    """A greeting, a reader of bodies, and a stream without end."""

    bodies: BodyReader
    num_sent_bytes: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def hello(self, request: Request) -> Response:
        return PlainTextResponse("hello")

    async def body(self, request: Request) -> Response:
        try:
            return PlainTextResponse(str(len(await self.bodies.read(request))))
        except RequestCancelled:
            return PlainTextResponse("gone")
        except NodeError as error:
            failure = failure_for(error, {})
            return JSONResponse(failure.body(), status_code=failure.status, headers=failure.headers())

    async def endless(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pour() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
                self.num_sent_bytes += 65536
                await asyncio.sleep(0)

        await receive()
        pouring = asyncio.create_task(pour())
        while (await receive())["type"] != "http.disconnect":
            continue
        pouring.cancel()
        self.gone.set()


@dataclass(frozen=True)
class Running:
    pages: Pages
    server: HttpServer
    trusting: ssl.SSLContext | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.server.advertised_address.split(":")
        return await asyncio.open_connection(host, int(port), ssl=self.trusting)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> MeshAuthority:
    return MeshAuthority(tmp_path_factory.mktemp("authority"))


def serving_tls(authority: MeshAuthority) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue("router"))
    return context


@pytest.fixture
async def start(authority: MeshAuthority) -> AsyncIterator[Start]:
    servers: list[HttpServer] = []

    async def make(bodies: BodyLimits | None = None, *, with_tls: bool = False, **limits: float) -> Running:
        pages = Pages(BodyReader(bodies or BodyLimits(max_bytes=1000, max_bytes_of_all=2000)))

        class Endless:
            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                await pages.endless(scope, receive, send)

        routes = [
            Route("/hello", pages.hello),
            Route("/body", pages.body, methods=["POST"]),
            Route("/endless", Endless()),
        ]
        chosen = ConnectionLimits(**{"head_s": WAIT_S, "unread_s": WAIT_S, **limits})  # type: ignore[arg-type]
        tls = serving_tls(authority) if with_tls else None
        server = HttpServer(Starlette(routes=routes), host="127.0.0.1", port=0, limits=chosen, tls=tls)
        await server.start()
        servers.append(server)
        return Running(pages, server, ssl.create_default_context(cafile=str(authority.path)) if with_tls else None)

    yield make
    for server in servers:
        await server.stop()


@asynccontextmanager
async def connected(running: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await running.connect()
    try:
        yield reader, writer
    finally:
        writer.close()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server hangs up, also where it resets because a byte more was on its way to it."""
    received = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(WAIT_S):
            while some := await reader.read(65_536):
                received += some
    return received


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One answer on a connection that stays."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
    status, *lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines if line)
    return int(status.split()[1]), fields, await reader.readexactly(int(fields["content-length"]))


def post_head(num_bytes: int) -> bytes:
    fields = ("host: x", "content-type: application/json", f"content-length: {num_bytes}")
    return "\r\n".join(("POST /body HTTP/1.1", *fields, "", "")).encode()


async def test_connections_beyond_the_limit_are_told_to_come_back(start: Start) -> None:
    running = await start(max_connections=2)
    async with connected(running) as (first, first_writer), connected(running) as (second, second_writer):
        for reader, writer in ((first, first_writer), (second, second_writer)):
            writer.write(GET)
            assert (await answer_of(reader))[2] == b"hello"
        async with connected(running) as (third, _):
            status, fields, body = await answer_of(third)
            assert (status, fields["retry-after"]) == (503, "1")
            assert json.loads(body)["error"]["message"] == "more than 2 connections are open"
            assert await rest_of(third) == b""
        first_writer.write(GET)
        assert (await answer_of(first))[0] == 200, "those that are in are served on"
    status = 503
    while status != 200:
        async with connected(running) as (fourth, writer):
            writer.write(GET)
            status, _, _ = await answer_of(fourth)


async def test_a_router_has_as_many_connections_as_it_is_told(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode
) -> None:
    router = await start_router(prefill, decode, http="127.0.0.1:0", http_max_connections=1)
    host, port = router.router.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await answer_of(reader))[0] == 200
    second, second_writer = await asyncio.open_connection(host, int(port))
    assert (await answer_of(second))[0] == 503
    for each in (writer, second_writer):
        each.close()


async def test_headers_that_come_byte_by_byte_are_given_up(start: Start) -> None:
    running = await start(head_s=0.5)
    async with connected(running) as (reader, writer):
        ended = asyncio.ensure_future(rest_of(reader))
        for byte in b"GET /hello HTTP/1.1\r\nx-slow: " + b"a" * 10_000:
            if ended.done() or writer.is_closing():
                break
            writer.write(bytes((byte,)))
            await asyncio.wait((ended,), timeout=0.05)
        answer = await ended
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"headers: not complete within 0.5 s" in answer


async def test_a_client_that_says_nothing_is_let_go_without_a_word(start: Start) -> None:
    running = await start(head_s=0.2)
    async with connected(running) as (reader, _):
        assert await rest_of(reader) == b""


async def test_a_handshake_that_does_not_come_is_not_waited_for(start: Start) -> None:
    running = await start(with_tls=True, head_s=0.2)
    async with connected(replace(running, trusting=None)) as (reader, _):
        assert await rest_of(reader) == b""


async def test_a_connection_that_is_idle_between_requests_is_closed(start: Start) -> None:
    running = await start(idle_s=1)
    async with connected(running) as (reader, writer):
        writer.write(GET)
        assert (await answer_of(reader))[0] == 200
        assert await rest_of(reader) == b""


async def test_further_requests_of_a_connection_have_the_same_time_for_their_headers(start: Start) -> None:
    running = await start(head_s=1)
    async with connected(running) as (reader, writer):
        for _ in range(2):
            writer.write(GET)
            assert (await answer_of(reader))[0] == 200
        writer.write(GET[:10])
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_comes_too_slowly_is_refused(start: Start) -> None:
    limits = BodyLimits(max_bytes=1000, max_bytes_of_all=2000, base_s=0.5, min_bytes_per_s=1000)
    running = await start(limits, linger_s=0.2)
    async with connected(running) as (reader, writer):
        writer.write(post_head(900))
        answered = asyncio.ensure_future(answer_of(reader))
        while not answered.done():
            writer.write(b" ")
            await asyncio.wait((answered,), timeout=0.05)
        status, _, body = answered.result()
        assert status == 408
        assert "0.5 s and one for every 1000 bytes allowed" in json.loads(body)["error"]["message"]
        ended = asyncio.ensure_future(rest_of(reader))
        while not ended.done():
            # However long the body goes on: it is answered.
            if not writer.is_closing():
                writer.write(b" ")
            await asyncio.wait((ended,), timeout=0.05)


async def test_a_body_is_read_at_a_speed_that_is_fast_enough(start: Start) -> None:
    limits = BodyLimits(max_bytes=1000, max_bytes_of_all=2000, base_s=5, min_bytes_per_s=1)
    running = await start(limits)
    async with connected(running) as (reader, writer):
        writer.write(post_head(5))
        for _ in range(5):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.02)
        assert (await answer_of(reader))[::2] == (200, b"5")


async def test_all_bodies_together_take_no_more_than_they_may(start: Start) -> None:
    running = await start(BodyLimits(max_bytes=100, max_bytes_of_all=120))
    async with connected(running) as (first, first_writer), connected(running) as (second, second_writer):
        first_writer.write(post_head(100) + b" " * 60)
        while not running.pages.bodies._num_held_bytes:
            await asyncio.sleep(0.01)
        second_writer.write(post_head(61) + b" " * 61)
        status, fields, body = await answer_of(second)
        assert (status, fields["retry-after"]) == (429, "1")
        assert "take 120 bytes" in json.loads(body)["error"]["message"]
        second_writer.write(post_head(60) + b" " * 60)
        assert (await answer_of(second))[::2] == (200, b"60")
        first_writer.write(b" " * 40)
        assert (await answer_of(first))[::2] == (200, b"100")
    async with connected(running) as (third, writer):
        writer.write(post_head(100) + b" " * 100)
        assert (await answer_of(third))[::2] == (200, b"100"), "what was read is given back"


@pytest.mark.parametrize("with_tls", [False, True])
async def test_a_client_that_reads_nothing_is_cut_off_and_holds_nothing(start: Start, with_tls: bool) -> None:
    running = await start(unread_s=0.3, with_tls=with_tls)
    async with connected(running) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(running.pages.gone.wait(), WAIT_S)
        # What the kernel and this client's own buffers took; without a bound it would go on for ever.
        assert running.pages.num_sent_bytes < 64 * 2**20
        assert reader is not None


@pytest.mark.parametrize("with_tls", [False, True])
async def test_a_client_that_reads_in_its_own_time_gets_everything(start: Start, with_tls: bool) -> None:
    running = await start(with_tls=with_tls)
    async with connected(running) as (reader, writer):
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        num_read = 0
        # Far more than all buffers on the way.
        while num_read < 12 * 2**20:
            num_read += len(await asyncio.wait_for(reader.read(2**20), WAIT_S))
            await asyncio.sleep(0)
        assert not running.pages.gone.is_set()
    await asyncio.wait_for(running.pages.gone.wait(), WAIT_S)


class Timers(asyncio.SelectorEventLoop):
    """A loop whose timers a test lets expire."""

    def __init__(self) -> None:
        super().__init__()
        self.set: list[tuple[float, Callable[[], object]]] = []

    def call_later(self, delay: float, callback: Callable[..., object], *args: object, **_: object) -> TimerHandle:
        handle = TimerHandle(0.0, callback, args, self)  # type: ignore[arg-type]
        self.set.append((delay, lambda: None if handle.cancelled() else callback(*args)))
        return handle


class Unsent(asyncio.Transport):
    """A connection with so many bytes that its client has not taken."""

    num_bytes = 0
    is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize(("left", "is_cut"), [((90_000, 50_000), False), ((90_000, 89_500), True), ((100_000,), True)])
def test_a_client_is_judged_by_what_it_takes_in_each_period(left: tuple[int, ...], is_cut: bool) -> None:
    loop, transport = Timers(), Unsent()
    config = uvicorn.Config(Starlette(), lifespan="off", log_config=None)
    make = bounded_by(ConnectionLimits(unread_s=7))
    protocol = make(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    protocol.connection_made(transport)
    transport.num_bytes = 100_000
    protocol.pause_writing()
    for num_bytes in left:
        transport.num_bytes = num_bytes
        period_s, expire = loop.set.pop()
        assert period_s == 7
        expire()
    assert transport.is_aborted is is_cut
    if not is_cut:
        protocol.resume_writing()
        loop.set.pop()[1]()
        assert not transport.is_aborted, "who has taken all is not judged"
    loop.close()


@pytest.mark.parametrize("name", ["max_connections", "head_s", "idle_s", "unread_s", "linger_s"])
def test_a_limit_that_lets_nothing_through_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: must be above 0, got 0"):
        ConnectionLimits(**{name: 0})


def test_bodies_need_room_for_at_least_one() -> None:
    with pytest.raises(ValueError, match=r"max_bytes_of_all: at least max_bytes \(10\) required, got 9"):
        BodyLimits(max_bytes=10, max_bytes_of_all=9)
