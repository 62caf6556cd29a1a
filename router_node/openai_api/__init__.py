"""The OpenAI-compatible HTTP API of a router: only it and `router_node.ui` import starlette, only it uvicorn.

It translates between HTTP and the messages of `pdmesh.v1.Inference`, and asks the same service object that gRPC does.
"""

from __future__ import annotations

from router_node.openai_api.app import ApiParts, CallRunner, ShownToken, make_app
from router_node.openai_api.body_reading import BodyLimits, BodyReader
from router_node.openai_api.connections import ConnectionLimits
from router_node.openai_api.server import HttpServer
from router_node.openai_api.tls import HttpsContexts

__all__ = [
    "ApiParts",
    "BodyLimits",
    "BodyReader",
    "CallRunner",
    "ConnectionLimits",
    "HttpServer",
    "HttpsContexts",
    "ShownToken",
    "make_app",
]
