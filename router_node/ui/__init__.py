"""The live page of a router: nodes, links, arenas, and what happened to the last requests."""

from __future__ import annotations

from router_node.ui.endpoints import UiParts, ui_routes
from router_node.ui.mesh_view import MeshView

__all__ = ["MeshView", "UiParts", "ui_routes"]
