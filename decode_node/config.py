"""Configuration of a decode node, and of a fused one: the same service, with and without a handoff."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator

from node_runtime.config import ComputeNodeConfig
from node_runtime.dns_names import check_entry
from node_runtime.errors import InvalidRequest
from node_runtime.handoff.lease import DEFAULT_LEASE_S, MAX_LEASE_S, MIN_LEASE_S

VerifyTransfers: TypeAlias = Literal["off", "sample", "all"]


class GeneratingNodeConfig(ComputeNodeConfig):
    """What a node that generates tokens needs to know."""

    engine_protocol: Literal["off", "smg"] = Field(
        default="off",
        description="Protocol that is served for gateways of other projects: smg, that of the SMG gateway, which needs "
        "the extra of this name; or off.",
    )


class FusedNodeConfig(GeneratingNodeConfig):
    """A node that computes prompts and generates tokens by itself."""

    role_name: ClassVar[str] = "fused"


class DecodeNodeConfig(GeneratingNodeConfig):
    """A node that receives the cache of prompts from prefill nodes and generates tokens."""

    role_name: ClassVar[str] = "decode"

    prefill: tuple[str, ...] = Field(
        default=(),
        description="Prefill node to connect to at start, host:port, or dns:host:port for one at each address of the "
        "host; may be repeated. The node is ready once one of them is. Others are connected to when a request names "
        "them.",
    )
    resolve_interval_s: float = Field(
        default=5.0, gt=0, le=3600, description="How often DNS names of prefill nodes are resolved. Seconds."
    )

    handoff_lease_s: float = Field(
        default=DEFAULT_LEASE_S,
        ge=MIN_LEASE_S,
        le=MAX_LEASE_S,
        description="How long a prefill node may write into this node, or be silent, without a renewal. Seconds.",
    )

    verify_transfers: VerifyTransfers = Field(
        default="off",
        description="Which handoffs are compared with their sender's checksums before decoding: off, sample, all.",
    )
    verify_sample: float = Field(
        default=0.05, gt=0, le=1, description="Share of the handoffs that verify_transfers=sample verifies."
    )

    local_prefill: Literal["never", "fallback"] = Field(
        default="never",
        description="Whether this node computes prompts itself when no prefill node can: never, or as a fallback. It "
        "slows the streams that it generates.",
    )
    max_local_prefill_tokens: int = Field(
        default=0,
        ge=0,
        description="A prompt of which no more than this is not in the cache of this node is computed here, without a "
        "prefill node. 0: none.",
    )

    @property
    def verified_fraction(self) -> float:
        """Share of the handoffs to verify, 0 to 1."""
        return {"off": 0.0, "sample": self.verify_sample, "all": 1.0}[self.verify_transfers]

    @field_validator("prefill")
    @classmethod
    def _check_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            try:
                check_entry(address)
            except InvalidRequest as error:
                raise ValueError(error.message) from None
        return tuple(dict.fromkeys(value))
