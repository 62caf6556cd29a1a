"""The page and what it asks for, as routes of the router's HTTP server.

The page itself is for everybody who can connect; what it shows is for those who may ask a node about itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from node_runtime.errors import NodeError
from node_runtime.rpc import RpcContext, status_of
from router_node.openai_api import CallRunner, ShownToken
from router_node.trace_store import TraceStore
from router_node.ui.mesh_view import JsonObject, MeshView
from router_node.ui.trace_view import list_traces, show_trace

# What the caller of this method may see is what the page shows.
_METHOD: Final = "/pdmesh.v1.Node/GetNodeStatus"
_LIMIT_S: Final = 5.0
_HTTP_STATUSES: Final = {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504}
# Nothing is loaded from elsewhere, and nobody frames it.
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UiParts:
    """What the page is made of. `traces` is None where the router keeps none."""

    calls: CallRunner
    mesh: MeshView
    traces: TraceStore | None
    model_name: str


def ui_routes(parts: UiParts) -> list[BaseRoute]:
    """For the application of the router's HTTP server."""
    pages = _Pages(parts)
    return [
        Route("/", pages.welcome, methods=["GET"]),
        Route("/ui", pages.page, methods=["GET"]),
        Route("/ui/state", pages.state, methods=["GET"]),
        Route("/ui/traces/{trace_id}", pages.trace, methods=["GET"]),
    ]


class _Pages:
    def __init__(self, parts: UiParts) -> None:
        self._parts = parts
        self._page = files("router_node.ui").joinpath("page.html").read_text(encoding="utf-8")

    async def welcome(self, request: Request) -> Response:
        """Whoever types the address into a browser sees the page instead of a path that does not exist."""
        return RedirectResponse("ui", headers=_HEADERS)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=_HEADERS)

    async def state(self, request: Request) -> Response:
        async def look(context: RpcContext) -> JsonObject:
            parts = self._parts
            traces = None if parts.traces is None else list_traces(parts.traces)
            return {"model": parts.model_name, **await parts.mesh.look(), "traces": traces}

        return await self._answer(request, look)

    async def trace(self, request: Request) -> Response:
        async def look(context: RpcContext) -> JsonObject | None:
            store = self._parts.traces
            return None if store is None else show_trace(store, str(request.path_params["trace_id"]))

        return await self._answer(request, look)

    async def _answer(self, request: Request, look: Callable[[RpcContext], Awaitable[JsonObject | None]]) -> Response:
        try:
            found = await self._parts.calls.run_call(
                look,
                method=_METHOD,
                peer="" if request.client is None else f"{request.client.host}:{request.client.port}",
                limit_s=_LIMIT_S,
                metadata=(),
                credentials=ShownToken(authorization=request.headers.get("authorization", "")),
            )
        except NodeError as error:
            status = _HTTP_STATUSES.get(status_of(error).name, 500)
            return JSONResponse({"error": error.message}, status_code=status, headers=_HEADERS)
        if found is None:
            return JSONResponse({"error": "no such trace is held"}, status_code=404, headers=_HEADERS)
        return JSONResponse(found, headers=_HEADERS)
