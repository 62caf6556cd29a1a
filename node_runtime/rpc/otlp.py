"""How OTLP endpoints are written and how their channels behave, the same for traces and metrics."""

from __future__ import annotations

from typing import Final, cast

EXPORT_TIMEOUT_S: Final = 2.0


def is_secure(endpoint: str) -> bool:
    """Whether the endpoint asks for TLS."""
    return endpoint.startswith("https://")


def endpoint_url(endpoint: str) -> str:
    """host:port as a URL; a URL as it is."""
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def channel_options() -> tuple[tuple[str, str]]:
    """No proxy, and back soon after the collector is. Declared as exporters do: a pair of strings, handed on as is."""
    options = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 1000))
    return cast("tuple[tuple[str, str]]", options)
