"""Configuration of a node: pydantic models whose field descriptions become the `--help` of the command line.

Knows no role and no command line. Every value is checked here, before anything exists; `load_config` turns a refusal
into one `BadConfig` that names every wrong key. The models are immutable.
"""

from __future__ import annotations

import difflib
import re
import secrets
import socket
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from node_runtime.errors import BadConfig

LogLevel = Literal["debug", "info", "warning", "error"]
DtypeName = Literal["float32", "bfloat16", "float16"]
WeightsName = Literal["auto", "float32", "quantized"]
DataPlaneName = Literal["auto", "shm", "stream", "mooncake", "memory"]
TransferProtocol = Literal["auto", "tcp", "rdma"]
EvictionPolicyName = Literal["lru", "aged_frequency"]

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_URL_CREDENTIALS = re.compile(r"//[^/@\s'\"]*@")
FIELD_ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_batch_size": ("max_num_seqs",),
    "token_budget": ("max_num_batched_tokens",),
}
"""Names that users of other engines know; taken as flags, as variables of the environment and as file keys."""

_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def parse_size(value: object) -> int:
    """Bytes of a size such as 4096, "512MiB" or "1.5 GB". Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE_PATTERN.fullmatch(value) if isinstance(value, str) else None
    unit = _SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"expected a size such as 512MiB or 1GiB, got {value!r}")
    num_bytes = float(match[1]) * unit
    if num_bytes != int(num_bytes):
        raise ValueError(f"expected a whole number of bytes, got {value!r}")
    return int(num_bytes)


def format_size(num_bytes: int) -> str:
    """The shortest binary form, e.g. 1073741824 -> "1GiB", 1610612736 -> "1.5GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _SIZE_UNITS[unit.upper()]
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g}{unit}"
    return f"{num_bytes}B"


ByteSize = Annotated[int, BeforeValidator(parse_size)]


class NodeConfig(BaseModel):
    """What every node needs to know, whatever its role."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    # Enters the default node_id; each role sets its own.
    role_name: ClassVar[str] = "node"

    node_id: str = Field(
        default="",
        description="Stable name of this node in logs, traces and replies. Default: role, host and a random suffix.",
    )
    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all interfaces."
    )
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    advertise_host: str = Field(
        default="",
        description="Host under which other nodes reach this one. Default: host, or the host name if that is 0.0.0.0.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="Where to send traces and metrics over OTLP/gRPC: host:port, or https://host:port for TLS. "
        "Default: nowhere.",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port on which /metrics answers a Prometheus, on the same host; 0 takes a free one. Default: none.",
    )
    tls_cert: str = Field(
        default="",
        description="PEM file with this node's certificate chain: encrypts every call. Its DNS names are the mesh's "
        "domain and ROLE.domain; read again when it is replaced.",
    )
    tls_key: str = Field(default="", description="PEM file with the key of that certificate.")
    tls_ca: str = Field(default="", description="PEM file with the authority that signs the certificates of the mesh.")
    tls_domain: str = Field(
        default="pdmesh.internal",
        pattern=r"^[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})*$",
        max_length=200,
        description="Domain of the mesh in certificates.",
    )
    health_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port on which grpc.health.v1 alone answers, unencrypted and to everybody, for probes that cannot "
        "show a certificate; 0 takes a free one. Default: none.",
    )
    log_level: LogLevel = Field(default="info", description="Least severe log records to print.")
    default_deadline_s: float = Field(
        default=600.0, gt=0, le=86400, description="Deadline of a request whose client set none. Seconds."
    )
    drain_grace_s: float = Field(
        default=30.0, ge=0, le=3600, description="How long running requests may go on after SIGTERM. Seconds."
    )
    max_message_bytes: ByteSize = Field(
        default=parse_size("4MiB"), ge=1024, le=2**31 - 1, description="Largest gRPC message, both ways, e.g. 4MiB."
    )
    max_waiting_requests: int = Field(
        default=256, ge=1, description="Requests that may wait for a place; more are refused with RESOURCE_EXHAUSTED."
    )

    @property
    def demands_client_certificates(self) -> bool:
        """Whether who calls must show a certificate, where there is TLS at all."""
        return True

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        files = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(files) and not all(files):
            raise ValueError("tls_cert, tls_key and tls_ca go together")
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_the_node(cls, values: object) -> object:
        if isinstance(values, Mapping) and not values.get("node_id"):
            host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60]
            return {**values, "node_id": f"{cls.role_name}-{host}-{secrets.token_hex(3)}"}
        return values

    @field_validator("node_id")
    @classmethod
    def _check_node_id(cls, value: str) -> str:
        if not _NAME_PATTERN.fullmatch(value):
            raise ValueError(f"expected 1 to 128 of the characters A-Z a-z 0-9 . _ -, got {value!r}")
        return value

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower_log_level(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_otlp_endpoint(cls, value: str | None) -> str | None:
        if not value:
            return None
        if not re.fullmatch(r"(https?://)?(\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+):\d{1,5}/?", value):
            raise ValueError(f"expected host:port, http://host:port or https://host:port, got {value!r}")
        return value.rstrip("/")

    def advertised_host(self) -> str:
        """Host name or address that peers can connect to."""
        if self.advertise_host:
            return self.advertise_host
        return socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host


class ComputeNodeConfig(NodeConfig):
    """What every node that runs the model needs: prefill, decode and fused."""

    model: str = Field(min_length=1, description="GGUF file, safetensors directory, or an alias: smollm2, gemma3.")
    served_model_name: str = Field(
        default="", max_length=128, description="Name clients use for the model. Default: name of the model file."
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda(:\d{1,3})?)$",
        description="What computes: cpu, cuda or cuda:INDEX. Only fused nodes compute on CUDA.",
    )
    dtype: DtypeName = Field(default="float32", description="Element type of activations and cache.")
    weights: WeightsName = Field(
        default="auto",
        description="Weights in memory: float32, quantized as in the file, or auto: quantized where there is a kernel. "
        "Results are the same.",
    )
    memory: ByteSize = Field(
        default=parse_size("1GiB"), ge=2**20, description="Size of the cache arena, e.g. 512MiB or 4GiB."
    )
    prefix_granularity: int = Field(
        default=64, ge=1, le=4096, description="Tokens per prefix-cache step; the same on all nodes of a mesh."
    )
    kernel_page_size: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Rows per page of the attention kernel. Default: from the kernel registry.",
    )
    max_batch_size: int = Field(
        default=64, ge=1, le=4096, description="Most requests in one forward pass (also: --max-num-seqs)."
    )
    token_budget: int = Field(
        default=512, ge=1, le=65536, description="Most tokens in one forward pass (also: --max-num-batched-tokens)."
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Prompt plus completion, in tokens. Default: the model's own context."
    )
    num_threads: int | None = Field(
        default=None, ge=1, le=1024, description="Compute threads. Default: all cores that this process may use."
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that share the heads of every layer, each with an arena of its own.",
    )
    stall_timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=86400,
        description="How long the engine may stand still before the liveness of the node fails. Seconds.",
    )
    enable_prefix_cache: bool = Field(default=True, description="Reuse the cache of prompts with equal beginnings.")
    data_plane: DataPlaneName = Field(
        default="auto",
        description="What moves the cache between nodes. auto: shared memory on one host, else RDMA by mooncake, else "
        "a TCP stream.",
    )
    data_plane_port: int = Field(
        default=0, ge=0, le=65535, description="TCP port of the stream data plane; 0 takes a free one."
    )
    data_plane_tls: Literal["auto", "off"] = Field(
        default="auto",
        description="Encryption of the stream data plane. auto: with the certificates below, else with those of the "
        "node's calls; off: none, inside a network that is trusted or encrypted itself.",
    )
    data_plane_tls_cert: str = Field(
        default="",
        description="PEM file with a certificate for the stream data plane alone, which names this node's host. "
        "Default: that of tls_cert, which names its role.",
    )
    data_plane_tls_key: str = Field(default="", description="PEM file with the key of that certificate.")
    data_plane_tls_ca: str = Field(
        default="", description="PEM file with the authority that signs the certificates of the mesh."
    )
    transfer_protocol: TransferProtocol = Field(
        default="auto",
        description="Transport of mooncake. auto: rdma where the machine has a device, else tcp.",
    )
    eviction_policy: EvictionPolicyName = Field(
        default="lru", description="Which cached prefixes go first: the least recently used, or by use and age."
    )
    rdma_device: str = Field(
        default="", description="RDMA device to use, e.g. mlx5_0. Default: the data plane chooses."
    )
    adapter: tuple[str, ...] = Field(
        default=(),
        description="NAME=PATH of a LoRA adapter, a directory as PEFT writes it, that requests may name.",
    )
    weight_version: str = Field(
        default="",
        max_length=128,
        description="Label of the loaded weights; nodes with different labels do not exchange cache.",
    )

    @field_validator("adapter")
    @classmethod
    def _check_adapters(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        pairs = [entry.partition("=") for entry in given]
        names = [name for name, _, _ in pairs]
        for entry, (name, _, path) in zip(given, pairs, strict=True):
            if not _NAME_PATTERN.fullmatch(name) or not path:
                raise ValueError(f"expected NAME=PATH, NAME of the characters A-Z a-z 0-9 . _ -, got {entry!r}")
            if names.count(name) > 1:
                raise ValueError(f'expected every name once, got "{name}" {names.count(name)} times')
        return given

    def adapters(self) -> dict[str, Path]:
        """The directory of each adapter by its name."""
        pairs = (entry.partition("=") for entry in self.adapter)
        return {name: Path(path) for name, _, path in pairs}

    @model_validator(mode="after")
    def _check_across_fields(self) -> ComputeNodeConfig:
        if self.rdma_device and self.transfer_protocol != "rdma":
            raise ValueError(
                f"rdma_device={self.rdma_device!r} needs transfer_protocol=rdma, got {self.transfer_protocol}"
            )
        tls = (self.data_plane_tls_cert, self.data_plane_tls_key, self.data_plane_tls_ca)
        if any(tls) and not all(tls):
            raise ValueError("data_plane_tls_cert, data_plane_tls_key and data_plane_tls_ca go together")
        if all(tls) and self.data_plane_tls == "off":
            raise ValueError("data_plane_tls_cert needs data_plane_tls=auto, got off")
        if all(tls) and self.data_plane not in ("auto", "stream"):
            raise ValueError(f"data_plane_tls_cert needs data_plane=stream or auto, got {self.data_plane}")
        if self.token_budget < self.max_batch_size:
            raise ValueError(
                f"token_budget={self.token_budget} must be at least max_batch_size={self.max_batch_size}: "
                "a full decode batch takes one token per request"
            )
        return self


ConfigT = TypeVar("ConfigT", bound=BaseModel)


def load_config(
    config_class: type[ConfigT], values: Mapping[str, object], *, origins: Mapping[str, str] | None = None
) -> ConfigT:
    """Builds and checks a configuration. BadConfig names every wrong key, its value, its limit and, for those in
    `origins`, where it was given. Secrets are not shown.
    """
    try:
        return config_class.model_validate(dict(values))
    except ValidationError as error:
        faults = (
            _describe_fault(config_class, dict(fault), origins or {}) for fault in error.errors(include_url=False)
        )
        raise BadConfig(_with_aliases(f"configuration: {'; '.join(faults)}")) from None


def _with_aliases(message: str) -> str:
    """The message, and the other names of the fields that it names."""
    also = [
        f"{name} is also called {' and '.join(aliases)}"
        for name, aliases in FIELD_ALIASES.items()
        if re.search(rf"\b{name}\b", message)
    ]
    return f"{message} ({', '.join(also)})" if also else message


def _describe_fault(config_class: type[BaseModel], fault: Mapping[str, object], origins: Mapping[str, str]) -> str:
    location = fault["loc"]
    path = location if isinstance(location, tuple) else (location,)
    key = ".".join(str(part) for part in path)
    field = str(path[0]) if path else ""
    message = without_credentials(str(fault["msg"]).removeprefix("Value error, "))
    if fault["type"] == "extra_forbidden":
        close = difflib.get_close_matches(field, config_class.model_fields, n=1)
        return f"{key}: unknown key of {config_class.__name__}" + (f', did you mean "{close[0]}"?' if close else "")
    if fault["type"] == "missing":
        return f"{key}: required"
    source = f" (from {origins[field]})" if field in origins else ""
    is_hidden = "got " in message or not key or is_secret(config_class.model_fields[field])
    shown = "" if is_hidden else f", got {without_credentials(repr(fault['input']))}"
    return f"{key}: {message}{shown}{source}" if key else message


def without_credentials(text: str) -> str:
    """The text with the user and password of URLs replaced."""
    return _URL_CREDENTIALS.sub("//***@", text)


def bare_type(annotation: object) -> object:
    """The annotation without Annotated and without `| None`; str for any other union."""
    if get_origin(annotation) is Annotated:
        return bare_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not types.NoneType]
        return bare_type(members[0]) if len(members) == 1 else str
    return annotation


def is_repeatable(field: FieldInfo) -> bool:
    """Whether the field holds any number of values."""
    return get_origin(bare_type(field.annotation)) in (list, tuple, set, frozenset)


def is_secret(field: FieldInfo) -> bool:
    """Whether the value of the field must not be shown."""
    return bare_type(field.annotation) is SecretStr


def has_own_syntax(field: FieldInfo) -> bool:
    """Whether the field reads text that its type alone does not tell, such as 512MiB."""
    return any(isinstance(part, BeforeValidator) for part in field.metadata)
