"""The calls that a router makes for each request: as many as there must be, and none that outlives its request; and
whether it lets tenants have what is theirs, and no more.

Seen from the network, so it knows neither retries nor hedges, only whether the router may make a second call beside a
first one. Calls to nodes that a fault concerns are not judged: their connections break without a frame. It counts what
moves: streams that go on elsewhere, and calls that follow one which the router gave up.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from pdmesh.v1 import decode_pb2, inference_pb2

from node_runtime.rpc.loopback_wire import CancelCall, EndCall, Frame, OpenCall
from simulation.findings import Journal
from simulation.tenants import LIMITS, tenant_of

_ASK, _GENERATE = "/pdmesh.v1.Inference/Generate", "/pdmesh.v1.Decode/Generate"
_Key: TypeAlias = tuple[str, int]
"""A call of the router: its node, and its number there."""


@dataclass(slots=True, eq=False)
class _Request:
    """`calls` are the open ones that are judged, each with the number of its sample, in the order in which they were
    made.
    """

    name: str
    tenant: str
    num_samples: int
    calls: dict[_Key, int] = field(default_factory=dict)
    # By sample, judged or not.
    open_calls: dict[int, set[_Key]] = field(default_factory=dict)
    # Samples that two calls were open for at once.
    hedged: set[int] = field(default_factory=set)
    # Samples whose last call the router gave up.
    given_up: set[int] = field(default_factory=set)
    # Of the same tenant, and live at some time while this one was.
    rivals: list[_Request] = field(default_factory=list)
    is_admitted: bool = False


class CallWatch:
    """Sees the frames of a network. `router` is a name; nodes in `touched` are not judged."""

    def __init__(self, router: str, *, may_hedge: bool, touched: Collection[str], journal: Journal) -> None:
        self._router = router
        self._max_calls = 2 if may_hedge else 1
        self._touched = touched
        self._journal = journal
        # By the client's process and the number of its call, by name, and by node and number of the router's call.
        self._asked: dict[tuple[str, int], _Request] = {}
        self._named: dict[str, _Request] = {}
        self._made: dict[_Key, tuple[_Request, int]] = {}

    def on_frame(self, source: str, target: str, method: str, frame: Frame) -> None:
        """A frame goes from `source` to `target`."""
        if self._router in self._touched:
            return
        if method == _GENERATE:
            self._on_call(source, target, frame)
        elif method == _ASK:
            self._on_request(source, target, frame)

    # Requests.

    def _on_request(self, source: str, target: str, frame: Frame) -> None:
        if isinstance(frame, OpenCall):
            message = inference_pb2.GenerateRequest.FromString(frame.data or b"")
            tenant = tenant_of(frame.metadata)
            request = _Request(message.request_id, tenant, max(1, message.num_samples))
            for other in self._asked.values():
                if other.tenant == tenant:
                    request.rivals.append(other)
                    other.rivals.append(request)
            self._asked[source, frame.call_id] = self._named[request.name] = request
        elif isinstance(frame, EndCall):
            ended = self._asked.pop((target, frame.call_id), None)
            if ended is not None:
                self._judge_end(ended, frame)

    def _judge_end(self, request: _Request, end: EndCall) -> None:
        for node, call_id in request.calls:
            del self._made[node, call_id]
            self._journal.find("left open", f"{request.name} has ended, and a call to {node} for it goes on")
        limit = LIMITS.get(request.tenant)
        if limit is not None and end.code.name == "RESOURCE_EXHAUSTED" and "tenant" in end.details:
            self._judge_refusal(request, limit)

    def _judge_refusal(self, request: _Request, limit: int) -> None:
        self._journal.count("tenant refused")
        num_samples = request.num_samples + sum(other.num_samples for other in request.rivals)
        if num_samples <= limit:
            most = f"tenant {request.tenant} had at most {num_samples} requests running"
            self._journal.find("tenant", f"{request.name} is refused, though {most}")

    def _admit(self, request: _Request) -> None:
        request.is_admitted = True
        limit = LIMITS.get(request.tenant)
        if limit is None:
            return
        live = [other for other in self._asked.values() if other.tenant == request.tenant and other.is_admitted]
        num_samples = sum(other.num_samples for other in live)
        if num_samples > limit:
            text = f"tenant {request.tenant} has {num_samples} requests running, {limit} are allowed"
            self._journal.find("tenant", text)

    # What the router calls for them.

    def _on_call(self, source: str, target: str, frame: Frame) -> None:
        if isinstance(frame, OpenCall):
            self._on_made(target, frame)
        elif isinstance(frame, CancelCall):
            self._end((target, frame.call_id), is_given_up=True)
        elif isinstance(frame, EndCall):
            self._end((source, frame.call_id), is_given_up=False)

    def _on_made(self, node: str, frame: OpenCall) -> None:
        message = decode_pb2.DecodeRequest.FromString(frame.data or b"")
        name, _, text = message.request_id.partition("~")[0].partition("+")
        request, sample, key = self._named[name], int(text or 0), (node, frame.call_id)
        if not request.is_admitted:
            self._admit(request)
        if message.num_output_tokens:
            self._journal.count("continuation")
        if sample in request.given_up:
            request.given_up.remove(sample)
            self._journal.count("move on silence")
        self._made[key] = (request, sample)
        open_calls = request.open_calls.setdefault(sample, set())
        if self._max_calls == 1:
            # The one before this has failed, by a connection that broke without a frame if not otherwise.
            open_calls.clear()
        open_calls.add(key)
        if node not in self._touched:
            self._begin(request, key, sample)

    def _begin(self, request: _Request, key: _Key, sample: int) -> None:
        request.calls[key] = sample
        num_calls = sum(other == sample for other in request.calls.values())
        if num_calls > self._max_calls:
            self._journal.find("many calls", f"{num_calls} calls at once for sample {sample} of {request.name}")
        elif num_calls > 1:
            request.hedged.add(sample)
            self._journal.count("hedge")

    def _end(self, key: _Key, *, is_given_up: bool) -> None:
        made = self._made.pop(key, None)
        if made is None:
            return
        request, sample = made
        open_calls = request.open_calls[sample]
        open_calls.discard(key)
        if is_given_up and not open_calls:
            request.given_up.add(sample)
        if key not in request.calls:
            return
        is_first = next(each for each, other in request.calls.items() if other == sample) == key
        del request.calls[key]
        if sample in request.hedged:
            request.hedged.remove(sample)
            if is_given_up:
                self._journal.count("hedge won" if is_first else "hedge lost")
