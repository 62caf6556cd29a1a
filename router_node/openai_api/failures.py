"""Errors in the shape, and with the HTTP statuses, that clients of the OpenAI API expect.

One table from gRPC statuses, so that both faces of a router refuse the same things for the same reasons. Knows no
transport.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from node_runtime.errors import ContextExceeded, InvalidRequest, NodeError, RequestTooLarge
from node_runtime.rpc import status_of

_INVALID: Final = "invalid_request_error"
_OVERLOADED: Final = "rate_limit_error"
_SERVER: Final = "server_error"
# How the API says that a name is wrong, that waiting helps, or that the context is too short, where it has a word.
_MODEL_NOT_FOUND: Final = "model_not_found"
_RATE_LIMITED: Final = "rate_limit_exceeded"
_TOO_LONG: Final = "context_length_exceeded"
_CODES: Mapping[str, str] = MappingProxyType({"NOT_FOUND": _MODEL_NOT_FOUND, "UNAUTHENTICATED": "invalid_api_key"})

# By the name of the gRPC status: HTTP status and type of error.
_KIND_BY_STATUS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "INVALID_ARGUMENT": (400, _INVALID),
        "UNAUTHENTICATED": (401, _INVALID),
        "PERMISSION_DENIED": (403, _INVALID),
        "NOT_FOUND": (404, _INVALID),
        "ALREADY_EXISTS": (409, _INVALID),
        # Without a delay after which it would succeed: too large for ever.
        "RESOURCE_EXHAUSTED": (400, _INVALID),
        "UNAVAILABLE": (503, _SERVER),
        "FAILED_PRECONDITION": (503, _SERVER),
        "DEADLINE_EXCEEDED": (504, _SERVER),
        "CANCELLED": (499, _SERVER),
    }
)
_FIELD_AND_RULE = re.compile(r"(?P<field>[a-z][a-z0-9_.]*(?:\[\d+\][a-z0-9_.]*)*): (?P<rule>.+)", re.DOTALL)
# What the two faces name alike, but for where it lies.
_SAMPLING: Final = "sampling."


class BadBody(InvalidRequest):
    """A request whose body or headers break a rule of HTTP or of this API. `param` is a field of the client's body."""

    def __init__(self, message: str, *, param: str | None = None, http_status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.http_status = http_status


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpFailure:
    """One refusal, ready to be sent. `param` names the field that is at fault, where one is."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return json.dumps(self.body(), ensure_ascii=False).encode()

    def headers(self) -> dict[str, str]:
        challenge = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is None:
            return challenge
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def failure_for(error: NodeError, field_names: Mapping[str, str]) -> HttpFailure:
    """`field_names` says how the client calls a field of the Inference service, where it is not the same word."""
    if isinstance(error, BadBody):
        return HttpFailure(status=error.http_status, message=error.message, kind=_INVALID, param=error.param)
    grpc_status = status_of(error).name
    status, kind = _KIND_BY_STATUS.get(grpc_status, (500, _SERVER))
    message, param, code = error.message, None, _CODES.get(grpc_status)
    if grpc_status == "RESOURCE_EXHAUSTED" and error.retry_after_s is not None:
        status, kind, code = 429, _OVERLOADED, _RATE_LIMITED
    elif kind == _INVALID and (match := _FIELD_AND_RULE.fullmatch(message)) is not None:
        param = _named_by_client(match["field"], field_names)
        if _is_too_long(error, match["field"]):
            code = _TOO_LONG
        message = f"{param}: {match['rule']}"
    return HttpFailure(
        status=status, message=message, kind=kind, param=param, code=code, retry_after_s=error.retry_after_s
    )


def _is_too_long(error: NodeError, field: str) -> bool:
    """A shorter prompt would help: it exceeds the model's context, or with its answer what any arena can hold."""
    return isinstance(error, ContextExceeded) or (isinstance(error, RequestTooLarge) and field == "max_tokens")


def _named_by_client(field: str, field_names: Mapping[str, str]) -> str:
    """The field with its longest known beginning replaced."""
    for own in sorted(field_names, key=len, reverse=True):
        if field == own or field.startswith((f"{own}.", f"{own}[")):
            return field_names[own] + field[len(own) :]
    return field.removeprefix(_SAMPLING)
