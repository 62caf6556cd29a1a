"""What the leading rank tells the others: every input of its scheduler, in order, and when to carry out a plan.

Frozen values and their JSON form. Plans are not sent: schedulers that were fed the same make the same ones, and the
digest that comes with `MakePlan` shows it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from scheduler_core import (
    AbortEvent,
    DoneEvent,
    Event,
    FailedEvent,
    FinishEvent,
    GrantedEvent,
    HandedOverEvent,
    Plan,
    QuiescedEvent,
    ReadyEvent,
    RequestSpec,
    ResultEvent,
    RetractEvent,
)

# Events of nothing but a request.
_NAMED_EVENTS: Mapping[str, Callable[[str], Event]] = MappingProxyType(
    {
        event.__name__: event
        for event in (
            AbortEvent,
            FailedEvent,
            FinishEvent,
            GrantedEvent,
            HandedOverEvent,
            QuiescedEvent,
            ReadyEvent,
            RetractEvent,
        )
    }
)


class OrderError(ValueError):
    """An event that no order can carry, or bytes that are no order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Give these requests to the scheduler, which accepts them."""

    requests: tuple[RequestSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Give these events to the scheduler."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan:
    """Ask the scheduler for its next plan, which has this digest."""

    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBlocks:
    """Zero the blocks that the plan acquired, and say so if it `is_answered`."""

    is_answered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run the rows of the plan. `adapters`: (request id, name) of the requests that have one."""

    adapters: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearCache:
    """Drop what no request holds."""


Order: TypeAlias = Submit | Advance | MakePlan | ZeroBlocks | Compute | ClearCache


def plan_digest(plan: Plan) -> int:
    """Equal for equal plans: whom they admit and let go, the rows, the tables, and what is zeroed and granted."""
    names = [
        plan.request_ids,
        plan.retracted,
        plan.finished,
        [admission.request_id for admission in plan.admissions],
        [handover.request_id for handover in plan.handovers],
        [[remote.request_id, remote.from_token, remote.first_slots] for remote in plan.remote_prefills],
    ]
    digest = zlib.crc32(json.dumps(names).encode())
    for array in (
        plan.begins,
        plan.input_lengths,
        plan.prefill_lengths,
        plan.token_ids,
        *plan.block_tables,
        *plan.zero_blocks,
        *(ids for remote in plan.remote_prefills for ids in remote.block_ids),
    ):
        digest = zlib.crc32(np.ascontiguousarray(array).data, digest)
    return digest


def encode_order(order: Order) -> bytes:
    """Raises OrderError for an event that followers are never sent."""
    return json.dumps(_to_json(order), separators=(",", ":")).encode()


def decode_order(payload: bytes) -> Order:
    """Raises OrderError."""
    try:
        return _from_json(json.loads(payload))
    except (ValueError, KeyError, TypeError) as error:
        raise OrderError(f"no order: {error!r}") from error


def _to_json(order: Order) -> Mapping[str, object]:
    match order:
        case Submit():
            return {"kind": "submit", "requests": [_request_to_json(request) for request in order.requests]}
        case Advance():
            return {"kind": "advance", "events": [_event_to_json(event) for event in order.events]}
        case MakePlan():
            return {"kind": "plan", "digest": order.digest}
        case ZeroBlocks():
            return {"kind": "zero", "is_answered": order.is_answered}
        case Compute():
            return {"kind": "compute", "adapters": order.adapters}
        case ClearCache():
            return {"kind": "clear"}


def _from_json(value: object) -> Order:
    match value:
        case {"kind": "submit", "requests": [*requests]}:
            return Submit(requests=tuple(map(_request_from_json, requests)))
        case {"kind": "advance", "events": [*events]}:
            return Advance(events=tuple(map(_event_from_json, events)))
        case {"kind": "plan", "digest": int(digest)}:
            return MakePlan(digest=digest)
        case {"kind": "zero", "is_answered": bool(is_answered)}:
            return ZeroBlocks(is_answered=is_answered)
        case {"kind": "compute", "adapters": [*adapters]}:
            return Compute(adapters=tuple(map(_adapter_from_json, adapters)))
        case {"kind": "clear"}:
            return ClearCache()
        case _:
            raise OrderError(f"no order: {value!r}")


def _adapter_from_json(value: object) -> tuple[str, str]:
    match value:
        case [str(request_id), str(name)]:
            return request_id, name
        case _:
            raise OrderError(f"no adapter of a request: {value!r}")


def _request_to_json(request: RequestSpec) -> Sequence[object]:
    keys = [key.hex() for key in request.extra_keys]
    return [request.request_id, request.tokens.tolist(), request.max_new_tokens, keys, request.local_prefill]


def _request_from_json(value: object) -> RequestSpec:
    match value:
        case [str(request_id), [*tokens], (int() | None) as max_new_tokens, [*keys], bool(local_prefill)]:
            return RequestSpec(
                request_id=request_id,
                tokens=np.array(tokens, dtype=np.int32),
                max_new_tokens=max_new_tokens,
                extra_keys=[bytes.fromhex(str(key)) for key in keys],
                local_prefill=local_prefill,
            )
        case _:
            raise OrderError(f"no request: {value!r}")


def _event_to_json(event: Event) -> Sequence[object]:
    match event:
        case ResultEvent():
            return ["ResultEvent", event.request_id, event.tokens]
        case DoneEvent():
            return ["DoneEvent", event.request_id, event.token]
        case (
            AbortEvent()
            | FailedEvent()
            | FinishEvent()
            | GrantedEvent()
            | HandedOverEvent()
            | QuiescedEvent()
            | ReadyEvent()
            | RetractEvent()
        ):
            return [type(event).__name__, event.request_id]
        case _:
            raise OrderError(f"{type(event).__name__} is no event that ranks share")


def _integers(values: Sequence[object]) -> list[int]:
    integers = [value for value in values if isinstance(value, int)]
    if len(integers) != len(values):
        raise OrderError(f"no integers: {values!r}")
    return integers


def _event_from_json(value: object) -> Event:
    match value:
        case ["ResultEvent", str(request_id), [*tokens]]:
            return ResultEvent(request_id, _integers(tokens))
        case ["DoneEvent", str(request_id), int(token)]:
            return DoneEvent(request_id, token)
        case [str(name), str(request_id)] if name in _NAMED_EVENTS:
            return _NAMED_EVENTS[name](request_id)
        case _:
            raise OrderError(f"no event: {value!r}")
