"""Configuration of a prefill node."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from node_runtime.config import ComputeNodeConfig
from node_runtime.handoff.lease import DEFAULT_GRANT_BOUND_S


class PrefillNodeConfig(ComputeNodeConfig):
    """A node that computes prompts and pushes their cache to decode nodes."""

    role_name: ClassVar[str] = "prefill"

    max_ready_ungranted: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="Prompts that may be computed while no decode node has given them memory; more wait in the queue.",
    )
    grant_timeout_s: float = Field(
        default=DEFAULT_GRANT_BOUND_S,
        gt=0,
        le=86400,
        description="How long such a prompt is kept before it is given up with RESOURCE_EXHAUSTED. Seconds.",
    )
