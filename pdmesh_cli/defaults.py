"""What the commands agree on when nothing else is said."""

from __future__ import annotations

from typing import Final

DEFAULT_ROUTER_PORT: Final = 7700
DEFAULT_HTTP_PORT: Final = 7780
DEFAULT_ROUTER: Final = f"127.0.0.1:{DEFAULT_ROUTER_PORT}"
TOKEN_VARIABLE: Final = "PDMESH_TOKEN"
