"""Configuration of a router: where the compute nodes are, and how much it accepts from clients."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from node_runtime.address import format_address, parse_address
from node_runtime.config import ByteSize, NodeConfig, parse_size
from node_runtime.dns_names import check_entry
from node_runtime.errors import InvalidRequest
from router_node.placement_policy import PolicyName

_MIN_FOLLOW_INTERVAL_S = 0.01


class RouterConfig(NodeConfig):
    """What a router needs to know."""

    role_name: ClassVar[str] = "router"

    model: str = Field(
        min_length=1,
        description="GGUF file, safetensors directory, or an alias: smollm2, gemma3. Only tokenizer and chat template "
        "are read.",
    )
    served_model_name: str = Field(
        default="", max_length=128, description="Name clients use for the model. Default: name of the model file."
    )
    prefill: tuple[str, ...] = Field(
        default=(), description="host:port of a prefill node, or dns:host:port for one at each address of the host."
    )
    decode: tuple[str, ...] = Field(default=(), description="host:port of a decode node, or dns:host:port likewise.")
    fused: tuple[str, ...] = Field(
        default=(), description="host:port of a fused node, which needs no prefill node beside it."
    )
    http: str = Field(
        default="",
        description="host:port to serve the OpenAI-compatible HTTP API at; port 0 takes a free one. Default: nowhere.",
    )
    http_max_connections: int = Field(
        default=4096, ge=1, description="HTTP connections that may be open at a time; more are refused with 503."
    )
    poll_interval_s: float = Field(
        default=1.0, gt=0, le=60, description="How often nodes are asked while one of them is not usable. Seconds."
    )
    idle_poll_interval_s: float = Field(
        default=15.0, gt=0, le=600, description="How often nodes are asked while all of them are well. Seconds."
    )
    placement_policy: PolicyName = Field(
        default="cache_aware",
        description="How requests are placed: by cached prefixes and estimated waits, by the number of requests, in "
        "turn, or by the beginning of the prompt.",
    )
    follow_interval_s: float = Field(
        default=0.25,
        ge=0,
        le=60,
        description="How often a node may tell its load and its cached prefixes; 0: never, then only what this router "
        "placed counts. Seconds.",
    )
    max_prefixes_per_node: int = Field(
        default=65_536, ge=0, description="Most cached prefixes that are remembered of one node."
    )
    resolve_interval_s: float = Field(
        default=5.0, gt=0, le=3600, description="How often DNS names of nodes are resolved. Seconds."
    )
    max_prompt_bytes: ByteSize = Field(
        default=parse_size("1MiB"), ge=1, description="Longest prompt text, all chat messages together, e.g. 1MiB."
    )
    max_stop_bytes: ByteSize = Field(
        default=parse_size("1KiB"), ge=1, description="Longest single stop string, e.g. 1KiB."
    )
    max_live_requests: int = Field(
        default=1024, ge=1, description="Requests served at a time; more are refused with RESOURCE_EXHAUSTED."
    )
    keep_traces: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Keep so many of the newest traces for pdmesh trace and the live page; nodes send them here when "
        "their --otlp-endpoint is the gRPC address of this router.",
    )
    max_attempts: int = Field(
        default=4, ge=1, le=100, description="How often a request is sent to nodes, the first time included."
    )
    retry_ratio: float = Field(
        default=0.2, ge=0, le=1, description="Most retries per request, over all requests and in the long run."
    )
    retry_burst: int = Field(
        default=256, ge=0, description="Retries at once beyond --retry-ratio, as the death of a node makes them."
    )
    silence_timeout_s: float = Field(
        default=8.0,
        ge=0,
        le=600,
        description="How long a decode node may say nothing about a request before another one takes it. Seconds. "
        "0: until the deadline.",
    )
    hedge_after_s: float = Field(
        default=0.0,
        ge=0,
        le=600,
        description="How long the first token is waited for, at least, before other nodes are asked as well. Seconds. "
        "0 without hedge_percentile: never.",
    )
    hedge_percentile: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the latest requests whose first token had come by the time at which a request that still "
        "waits for its own is hedged, e.g. 0.95. 0: hedge_after_s alone decides.",
    )

    client_certificates: bool = Field(
        default=False, description="With TLS: demand a certificate of the mesh's authority from clients too."
    )
    tenants: str = Field(
        default="",
        description="YAML file with those who may call and the SHA-256 of their tokens; read again when it is "
        "replaced. Default: everybody may call.",
    )

    @field_validator("prefill", "decode", "fused")
    @classmethod
    def _check_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            try:
                check_entry(address)
            except InvalidRequest as error:
                raise ValueError(str(error)) from None
        return addresses

    @field_validator("http")
    @classmethod
    def _check_http(cls, address: str) -> str:
        try:
            return address and format_address(*parse_address(address, min_port=0))
        except InvalidRequest as error:
            raise ValueError(str(error)) from None

    @field_validator("follow_interval_s")
    @classmethod
    def _check_follow_interval(cls, value: float) -> float:
        if 0 < value < _MIN_FOLLOW_INTERVAL_S:
            raise ValueError(f"expected 0 or at least {_MIN_FOLLOW_INTERVAL_S}, got {value}")
        return value

    @model_validator(mode="after")
    def _check_across_fields(self) -> RouterConfig:
        listed = (*self.prefill, *self.decode, *self.fused)
        if not self.fused and not (self.prefill and self.decode):
            raise ValueError("prefill, decode, fused: give at least one prefill and one decode node, or one fused node")
        repeated = sorted({address for address in listed if listed.count(address) > 1})
        if repeated:
            raise ValueError(f"prefill, decode, fused: {', '.join(repeated)} appears more than once")
        return self

    @property
    def demands_client_certificates(self) -> bool:
        return self.client_certificates

    def model_name(self) -> str:
        """The name under which the model is served."""
        path = Path(self.model)
        return self.served_model_name or (path.name if path.is_dir() else path.stem)
