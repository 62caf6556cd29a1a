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


def _check_handoff_id(handoff_id: bytes) -> None:
    require(
        len(handoff_id) == HANDOFF_ID_BYTES, f"handoff_id: {len(handoff_id)} bytes given, {HANDOFF_ID_BYTES} required"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Opens a handoff: the prompt and how its first token is sampled."""

    handoff_id: bytes
    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    extra_keys: tuple[bytes, ...] = ()
    decode_incarnation: int
    prefill_incarnation: int

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)
        check_request_id(self.request_id)
        require(len(self.token_ids) > 0, "token_ids: empty, at least one token required")
        check_extra_keys(self.extra_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The prompt was admitted; `cached_tokens` of it came from the prefill node's own cache."""

    handoff_id: bytes
    cached_tokens: int

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)
        require(self.cached_tokens >= 0, f"cached_tokens: {self.cached_tokens} given, at least 0 required")


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
    """The decode node's memory for the prompt tokens [from_token, end of the prompt)."""

    handoff_id: bytes
    from_token: int
    groups: tuple[GroupGrant, ...]

    def __post_init__(self) -> None:
        _check_handoff_id(self.handoff_id)
        require(self.from_token >= 0, f"from_token: {self.from_token} given, at least 0 required")


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
class Done:
    """Every byte of the grant has landed, and nothing more will be written for this handoff."""

    handoff_id: bytes
    first_token: SampledToken
    transferred_bytes: int
    transferred_blocks: int
    transferred_runs: int
    timings: HandoffTimings = field(default_factory=HandoffTimings)

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


RequestMessage: TypeAlias = Start | Grant | Abort
ResponseMessage: TypeAlias = Ready | Done | Failed | Quiesced
