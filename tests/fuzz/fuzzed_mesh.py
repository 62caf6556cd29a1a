"""Nodes of every role in this process, each with a small model, and how to tell that whatever came left them well.

They live on an event loop that runs only inside `run`, so that a property which is no coroutine can talk to them again
and again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import grpc
from fuzz.good_messages import trace_exports
from google.protobuf.descriptor import MethodDescriptor
from support.fake_mesh import FakeMesh, FakeNode, until
from support.fake_router import FakeRouter
from support.model_core import model_core
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

from model_runtime.checkpoint import open_checkpoint

ResultT = TypeVar("ResultT")

PROTOS = Path(__file__).parents[2] / "protos" / "pdmesh" / "v1"
PROMPT = list(b"what was, is and shall be")
# How long a stream may say nothing before its caller has seen enough.
SILENCE_S = 0.15
_QUIET_WITHIN_S = 20.0
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
# What grpcio says, in the place of the call's own status, when a write meets the end of the stream.
_WRITE_MET_THE_END = "Internal error from Core"

_STATUS_NAME = re.compile(r"\b(" + "|".join(code.name for code in grpc.StatusCode) + r")\b")
# What the frame around every handler answers: to bytes that are no message, to a message above the limit, and when time
# is up or the caller leaves.
FRAME_STATUSES = frozenset(
    (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    )
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended, and what it gave before."""

    code: grpc.StatusCode
    details: str
    responses: tuple[bytes, ...]


def all_methods() -> Iterator[MethodDescriptor]:
    """Every RPC of every service of this project."""
    for path in sorted(PROTOS.glob("*.proto")):
        module = import_module(f"pdmesh.v1.{path.stem}_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def documented_statuses(method: MethodDescriptor) -> frozenset[grpc.StatusCode]:
    """The statuses that the comment above the RPC names, and those of the frame."""
    text = (PROTOS / Path(method.containing_service.file.name).name).read_text(encoding="utf-8")
    service = text[text.index(f"service {method.containing_service.name} ") :]
    before = service[: service.index(f"rpc {method.name}(")].splitlines()[:-1]
    comment: list[str] = []
    while before and before[-1].lstrip().startswith("//"):
        comment.append(before.pop())
    return FRAME_STATUSES | {grpc.StatusCode[name] for name in _STATUS_NAME.findall("\n".join(comment))}


class _Alarms(logging.Handler):
    """Keeps what a healthy node does not log: errors, and whatever comes with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.tracebacks: list[str] = []
        self.errors: list[str] = []

    def take(self) -> tuple[list[str], list[str]]:
        """Tracebacks and other errors since the last time."""
        taken = self.tracebacks, self.errors
        self.tracebacks, self.errors = [], []
        return taken

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        if record.exc_info:
            self.tracebacks.append(text)
        elif record.levelno >= logging.ERROR:
            self.errors.append(text)


class FuzzedMesh:
    """Use as a context manager."""

    def __init__(self, folder: Path, **fused_config: object) -> None:
        """`fused_config`: options of the fused node."""
        self._fused_config = fused_config
        self._runner = asyncio.Runner()
        self._checkpoint = open_checkpoint(write_tiny_checkpoint(folder / "tiny"))
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._alarms = _Alarms()
        self.nodes: dict[str, FakeNode] = {}
        self.addresses: dict[str, str] = {}

    def __enter__(self) -> FuzzedMesh:
        logging.getLogger().addHandler(self._alarms)
        self.run(self._start())
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.run(self._stop())
        finally:
            self._runner.close()
            logging.getLogger().removeHandler(self._alarms)

    def run(self, work: Coroutine[object, object, ResultT]) -> ResultT:
        """Lets the nodes work until `work` is done."""
        return self._runner.run(work)

    async def _start(self) -> None:
        self.mesh = FakeMesh(partial(model_core, checkpoint=self._checkpoint))
        prefill = await self.mesh.prefill()
        decode = await self.mesh.decode(prefill)
        fused, leaving = await self.mesh.fused(config=self._fused_config), await self.mesh.fused()
        # Whoever is told to drain does not come back.
        self.nodes = {"prefill": prefill, "decode": decode, "fused": fused, "leaving": leaving}
        self.router = FakeRouter(
            prefill=[prefill],
            decode=[decode],
            vocab_size=VOCAB_SIZE,
            fused=[fused.address],
            keep_traces=20,
            http="127.0.0.1:0",
        )
        await self.router.__aenter__()
        self.addresses = {name: node.address for name, node in self.nodes.items()}
        self.addresses["router"] = self.router.router.address
        await until(lambda: self.router.router._pool.is_ready, "the router knows its nodes")
        # Something that can be asked for.
        (export,) = trace_exports()
        await self.channel("router").unary_unary(_EXPORT)(export.SerializeToString(), timeout=10)
        self._expected = (await self.mesh.generate(fused, PROMPT)).token_ids
        await self._answers()
        self._num_tasks = len(asyncio.all_tasks())

    async def add_verifying_node(self) -> FakeNode:
        """A decode node that compares every handoff with its sender's checksums; it is named "verifying"."""
        self.nodes["verifying"] = node = await self.mesh.decode(config={"verify_transfers": "all"})
        await self._answers()
        self._num_tasks = len(asyncio.all_tasks())
        return node

    async def _stop(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        await self.router.__aexit__()
        await self.mesh.close()

    def channel(self, name: str) -> grpc.aio.Channel:
        """To the node of that name; requires the event loop."""
        if name not in self._channels:
            # What the sender would refuse to send is the receiver's to refuse.
            options = (("grpc.max_send_message_length", -1),)
            self._channels[name] = grpc.aio.insecure_channel(self.addresses[name], options=options)
        return self._channels[name]

    async def call(self, name: str, method: MethodDescriptor, request: bytes, *, timeout_s: float) -> Outcome:
        """One call whose request is a single message, to its end."""
        channel, path = self.channel(name), f"/{method.containing_service.full_name}/{method.name}"
        responses: list[bytes] = []
        try:
            if method.server_streaming:
                call = channel.unary_stream(path)(request, timeout=timeout_s)
                async for response in call:
                    responses.append(response)
            else:
                responses.append(await channel.unary_unary(path)(request, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            return Outcome(error.code(), error.details() or "", tuple(responses))
        return Outcome(grpc.StatusCode.OK, "", tuple(responses))

    async def talk(
        self, name: str, method: MethodDescriptor, script: Sequence[bytes | None], *, half_closes: bool
    ) -> Outcome:
        """A stream on which `script` is said, with None where an answer is waited for; ended once all is silent."""
        call = self.channel(name).stream_stream(f"/{method.containing_service.full_name}/{method.name}")(timeout=10)
        responses: list[bytes] = []

        async def hear() -> bool:
            try:
                response = await asyncio.wait_for(call.read(), SILENCE_S)
            except TimeoutError:
                return False
            if response is grpc.aio.EOF:
                return False
            responses.append(response)
            return True

        try:
            for message in script:
                if message is None:
                    await hear()
                else:
                    await call.write(message)
            if half_closes:
                await call.done_writing()
            while await hear():
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The peer ended it; its status says why.
            pass
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
        call.cancel()
        code, details = await call.code(), await call.details() or ""
        if code is grpc.StatusCode.INTERNAL and details == _WRITE_MET_THE_END:
            code = grpc.StatusCode.CANCELLED
        return Outcome(code, details, tuple(responses))

    # What must hold afterwards.

    async def assert_unharmed(self, *, may_complain: bool = False) -> None:
        """Nothing was logged that should not be, nothing is held for anybody, and the right text is still given."""
        await self.assert_quiet(may_complain=may_complain)
        await self._answers()
        for name, node in self.nodes.items():
            await node.assert_all_blocks_return()
            assert not node.fatal, name
        await until(lambda: len(asyncio.all_tasks()) <= self._num_tasks, "every task has ended", _QUIET_WITHIN_S)

    async def assert_quiet(self, *, may_complain: bool = False) -> None:
        """The cheaper part of it, for after every few calls. `may_complain`: of a peer that did wrong, in one line."""
        for name, node in self.nodes.items():
            await until(node.is_quiet, f"{name} holds nothing", _QUIET_WITHIN_S)
        tracebacks, errors = self._alarms.take()
        assert not tracebacks, "\n".join(tracebacks)
        assert may_complain or not errors, "\n".join(errors)

    async def _answers(self) -> None:
        prefill_address = self.nodes["prefill"].address
        for name, fields in (("fused", {}), ("decode", {"prefill_address": prefill_address})):
            answer = await self.mesh.generate(self.nodes[name], PROMPT, **fields)
            assert answer.token_ids == self._expected, name
        for _ in range(2):
            routed = await self.router.generate(PROMPT)
            assert routed.token_ids == self._expected
