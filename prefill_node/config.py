"""Configuration of a prefill node."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from node_runtime.config import ComputeNodeConfig


class PrefillNodeConfig(ComputeNodeConfig):
    """A node that computes prompts and pushes their cache to decode nodes."""

    role_name: ClassVar[str] = "prefill"

    max_ready_ungranted: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="Prompts that may be computed while no decode node has given them memory; more wait in the queue.",
    )
