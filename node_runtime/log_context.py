"""Log records of a node: one line each, carrying node, request and trace ids.

The ids live in context variables, so they follow a request through the coroutines that serve it. Knows neither gRPC
nor OpenTelemetry: whoever opens a request or a span binds the ids here.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar, Token
from typing import TextIO

_request_id: ContextVar[str] = ContextVar("pdmesh_request_id", default="")
_trace_id: ContextVar[str] = ContextVar("pdmesh_trace_id", default="")
# What was bound last inside the current call, by variable name: how a call ended is logged after its scopes are left.
_call: ContextVar[dict[str, str] | None] = ContextVar("pdmesh_call", default=None)

# A record stays one line whatever a client puts into a name, and a terminal sees no control sequence.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): " "}


def bound_request_id(request_id: str) -> AbstractContextManager[None]:
    """Puts `request_id` on every record logged inside."""
    return _Bound(_request_id, request_id)


def bound_trace_id(trace_id: str) -> AbstractContextManager[None]:
    """Puts `trace_id` on every record logged inside. Empty: no trace."""
    return _Bound(_trace_id, trace_id)


def current_request_id() -> str:
    """The one that a record which is logged now would carry; empty for none."""
    return _current(_request_id)


def call_scope() -> AbstractContextManager[None]:
    """Keeps the ids bound inside for records that are logged in this scope after the binding has ended."""
    return _CallScope()


def _current(variable: ContextVar[str]) -> str:
    return variable.get() or (_call.get() or {}).get(variable.name, "")


class _CallScope:
    """A class and no generator, as `_Bound` is."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _call.set({})

    def __exit__(self, *exc_info: object) -> None:
        with suppress(ValueError):
            _call.reset(self._token)


class _Bound:
    """A class and no generator, because every span of every call binds something."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[str], value: str) -> None:
        self._variable = variable
        self._value = value
        self._token: Token[str] | None = None

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)
        if (call := _call.get()) is not None:
            call[self._variable.name] = self._value

    def __exit__(self, *exc_info: object) -> None:
        token, self._token = self._token, None
        if token is not None:
            # An abandoned generator is closed by another task, whose context never saw the value.
            with suppress(ValueError):
                self._variable.reset(token)


class LineFormatter(logging.Formatter):
    """`time level node_id [request_id trace_id] logger: message`, with `-` for an id that is unknown."""

    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        ids = f"{_current(_request_id) or '-'} {_current(_trace_id) or '-'}"
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}: {self.formatException(record.exc_info)}"
        line = f"{seconds}.{int(record.msecs):03d}Z {record.levelname} {self._node_id} [{ids}] {record.name}: {text}"
        return line.translate(_ESCAPES)


def setup_logging(node_id: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Sends all records of this process to `stream` (default: standard error). A second call replaces the first."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(node_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # These libraries narrate every retry and every file they open.
    for noisy in ("asyncio", "grpc", "opentelemetry"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
