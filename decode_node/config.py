"""Configuration of a decode node, and of a fused one: the same service, with and without a handoff."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from node_runtime.config import ComputeNodeConfig
from node_runtime.errors import InvalidRequest
from node_runtime.handoff.lease import DEFAULT_LEASE_S, MAX_LEASE_S, MIN_LEASE_S
from node_runtime.rpc.address import parse_address


class FusedNodeConfig(ComputeNodeConfig):
    """A node that computes prompts and generates tokens by itself."""

    role_name: ClassVar[str] = "fused"


class DecodeNodeConfig(ComputeNodeConfig):
    """A node that receives the cache of prompts from prefill nodes and generates tokens."""

    role_name: ClassVar[str] = "decode"

    prefill: tuple[str, ...] = Field(
        default=(),
        description="Prefill node to connect to at start, host:port; may be repeated. The node is ready once one of "
        "them is. Others are connected to when a request names them.",
    )

    handoff_lease_s: float = Field(
        default=DEFAULT_LEASE_S,
        ge=MIN_LEASE_S,
        le=MAX_LEASE_S,
        description="How long a prefill node may write into this node, or be silent, without a renewal. Seconds.",
    )

    @field_validator("prefill")
    @classmethod
    def _check_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            try:
                parse_address(address)
            except InvalidRequest as error:
                raise ValueError(error.message) from None
        return tuple(dict.fromkeys(value))
