"""The control messages of one handoff as frozen values.

They mirror protos/pdmesh/v1/handoff.proto. This module knows neither protobuf nor gRPC: `node_runtime.wire` translates,
and hands over only values that passed the checks below, which raise InvalidRequest. Checks that need the model or the
peer's manifest live in `checks.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from node_runtime.request_rules import check_extra_keys, check_request_id, require

if TYPE_CHECKING:
    from model_runtime.sampler import SampledToken, SamplingParams

HANDOFF_ID_BYTES = 16
DIGEST_BYTES = 8
# A lease shorter than a few turns of a busy event loop would lapse by itself; a longer one keeps the blocks of a dead
# peer for nothing.
MIN_LEASE_MS = 400
MAX_LEASE_MS = 60_000


def _check_handoff_id(handoff_id: bytes) -> None:
    require(
        len(handoff_id) == HANDOFF_ID_BYTES, f"handoff_id: {len(handoff_id)} bytes given, {HANDOFF_ID_BYTES} required"
    )


def _check_lease(lease_ms: int) -> None:
    require(
        lease_ms == 0 or MIN_LEASE_MS <= lease_ms <= MAX_LEASE_MS,
        f"lease_ms: {lease_ms} given, {MIN_LEASE_MS} to {MAX_LEASE_MS} or none allowed",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Opens a handoff: the prompt and how its first token is sampled. `lease_ms` is 0 when the node knows no leases.

    The last `num_output_tokens` of `token_ids` are output of an earlier attempt.
    """

    handoff_id: bytes
    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    extra_keys: tuple[bytes, ...] = ()
    decode_incarnation: int
    prefill_incarnation: int
    lease_ms: int = 0
    wants_checksums: bool = False
    num_output_tokens: int = 0

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)
        _check_lease(self.lease_ms)
        check_request_id(self.request_id)
        require(len(self.token_ids) > 0, "token_ids: empty, at least one token required")
        check_extra_keys(self.extra_keys)
        require(
            0 <= self.num_output_tokens < len(self.token_ids),
            f"num_output_tokens: {self.num_output_tokens} given, fewer than the {len(self.token_ids)} of token_ids "
            "required",
        )

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """The completion so far."""
        return self.token_ids[len(self.token_ids) - self.num_output_tokens :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The prompt was admitted; `cached_tokens` of it came from the prefill node's own cache.

    A Beat follows every `beat_interval_ms`; 0 when the node knows no leases.
    """

    handoff_id: bytes
    cached_tokens: int
    beat_interval_ms: int = 0

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)
        require(self.cached_tokens >= 0, f"cached_tokens: {self.cached_tokens} given, at least 0 required")
        require(
            0 <= self.beat_interval_ms <= MAX_LEASE_MS,
            f"beat_interval_ms: {self.beat_interval_ms} given, at most {MAX_LEASE_MS} allowed",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The prefill node is alive and goes on: the `number`-th sign of it since Ready."""

    handoff_id: bytes
    number: int

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)
        require(self.number >= 1, f"number: {self.number} given, at least 1 required")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGrant:
    """Blocks of one group to fill, for the table slots [first_slot, first_slot + len(block_ids))."""

    group_id: str
    first_slot: int
    block_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        require(
            self.first_slot >= 0, f'group "{self.group_id}" first_slot: {self.first_slot} given, at least 0 required'
        )

    @property
    def end_slot(self) -> int:
        return self.first_slot + len(self.block_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The decode node's memory for the prompt tokens [from_token, end of the prompt).

    It may be written to for `lease_ms` from the sending of Beat number `beat`, 0 for Ready; `lease_ms` is 0 when a side
    knows no leases.
    """

    handoff_id: bytes
    from_token: int
    groups: tuple[GroupGrant, ...]
    lease_ms: int = 0
    beat: int = 0

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)
        _check_lease(self.lease_ms)
        require(self.from_token >= 0, f"from_token: {self.from_token} given, at least 0 required")
        require(self.beat >= 0, f"beat: {self.beat} given, at least 0 required")


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """The lease counts from the sending of Beat number `beat`."""

    handoff_id: bytes
    beat: int

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)
        require(self.beat >= 1, f"beat: {self.beat} given, at least 1 required")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTimings:
    """What the prefill node measured, in milliseconds of its own clock (see handoff.proto)."""

    queue_ms: float = 0.0
    compute_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_exposed_ms: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (
            ("queue_ms", self.queue_ms),
            ("compute_ms", self.compute_ms),
            ("transfer_ms", self.transfer_ms),
            ("transfer_exposed_ms", self.transfer_exposed_ms),
        ):
            require(math.isfinite(value) and value >= 0, f"timings.{name}: {value} given, finite and >= 0 required")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChecksums:
    """Digests of blocks of one field, from the table slot `first_slot` on (`cache_runtime.transfer.checksums`).

    `tp_rank`: the tensor rank of the decode node that holds them.
    """

    field_id: str
    first_slot: int
    digests: bytes
    tp_rank: int = 0

    def __post_init__(self) -> None:
        require(self.tp_rank >= 0, f'field "{self.field_id}" tp_rank: {self.tp_rank} given, at least 0 required')
        require(
            len(self.digests) % DIGEST_BYTES == 0,
            f'field "{self.field_id}" digests: {len(self.digests)} bytes given, a multiple of {DIGEST_BYTES} required',
        )

    @property
    def num_blocks(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    @property
    def end_slot(self) -> int:
        return self.first_slot + self.num_blocks

    @property
    def where(self) -> str:
        """For messages to people."""
        rank = f" of tensor rank {self.tp_rank}" if self.tp_rank else ""
        return f"{self.field_id}{rank}, table slots [{self.first_slot}, {self.end_slot})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """The `part`-th message that says what blocks hold that have landed."""

    handoff_id: bytes
    part: int
    fields: tuple[FieldChecksums, ...]

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)
        require(self.part >= 0, f"part: {self.part} given, at least 0 required")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Every byte of the grant has landed, and nothing more will be written for this handoff.

    `num_checksum_parts` Checksums were sent before, 0 unless Start asked for them.
    """

    handoff_id: bytes
    first_token: SampledToken
    transferred_bytes: int
    transferred_blocks: int
    transferred_runs: int
    timings: HandoffTimings = field(default_factory=HandoffTimings)
    num_checksum_parts: int = 0

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The prefill node gave up. `code` is a canonical gRPC status number, never 0."""

    handoff_id: bytes
    code: int
    message: str

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)
        require(1 <= self.code <= 16, f"code: {self.code} given, 1 to 16 allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The decode node gave up."""

    handoff_id: bytes
    reason: str

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiesced:
    """No write is outstanding and none will be posted any more."""

    handoff_id: bytes

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)


RequestMessage: TypeAlias = Start | Grant | Renewed | Abort
ResponseMessage: TypeAlias = Ready | Beat | Checksums | Done | Failed | Quiesced
