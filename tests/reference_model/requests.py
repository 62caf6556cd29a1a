"""A live request: what it wants, where it stands and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from reference_model.coordinator import Prefix
from reference_model.pool import Table
from reference_model.values import Role, Submission


class Phase(Enum):
    AWAITING_READY = "awaiting_ready"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    AWAITING_RESULT = "awaiting_result"
    REMOTE_PREFILLING = "remote_prefilling"
    PREFILL_DONE = "prefill_done"
    DECODING = "decoding"
    HANDING_OVER = "handing_over"
    TRANSFER_HELD = "transfer_held"
    QUARANTINED = "quarantined"
    RETRACTED = "retracted"
    FINISHED = "finished"


NEVER_RAN = (Phase.AWAITING_READY, Phase.WAITING)
HOLDS_NOTHING = (*NEVER_RAN, Phase.RETRACTED)
HAS_ENDED = (Phase.TRANSFER_HELD, Phase.QUARANTINED, Phase.FINISHED)


@dataclass(slots=True)
class Request:
    """`num_overtakes`: younger prompts admitted while this one did not fit. `prompt_tokens`: what a prefill computes;
    a retraction adds what was generated. `limit_tokens`: prompt and completion at most. `num_retractions`: for want of
    memory; `retraction_epoch` rises with every retraction. `is_secured`: what it holds covers all it may generate."""

    submission: Submission
    is_remote: bool
    phase: Phase
    tokens: list[int]
    num_prompt_tokens: int
    limit_tokens: int
    num_retractions: int = 0
    retraction_epoch: int = 0
    is_secured: bool = False
    num_results_out: int = 0
    is_granted: bool = False
    did_not_fit: bool = False
    num_overtakes: int = 0
    slot: int = 0
    epoch: int = 0
    num_hit_tokens: int = 0
    num_computed_tokens: int = 0
    num_published_grains: int = 0
    tables: list[Table] = field(default_factory=list)

    @staticmethod
    def of(submission: Submission, role: Role, max_request_tokens: int) -> Request:
        """On the decode role a peer fills the prompt, and nothing starts before it is ready, unless the submission
        asks to be computed here."""
        is_remote = role is Role.DECODE and not submission.local_prefill
        phase = Phase.AWAITING_READY if is_remote else Phase.WAITING
        num_prompt = len(submission.tokens)
        limit = max_request_tokens
        if submission.max_new_tokens is not None:
            limit = min(limit, num_prompt + submission.max_new_tokens)
        return Request(submission, is_remote, phase, list(submission.tokens), num_prompt, limit)

    @property
    def request_id(self) -> str:
        return self.submission.request_id

    @property
    def num_wanted_tokens(self) -> int:
        """What may be generated behind the prompt as it is."""
        return max(0, self.limit_tokens - self.num_prompt_tokens)

    @property
    def has_output(self) -> bool:
        return len(self.tokens) > len(self.submission.tokens)

    @property
    def is_complete(self) -> bool:
        """Retracted when nothing was left to generate: it waits for the runtime's finish."""
        return self.phase is Phase.RETRACTED and self.has_output and self.num_wanted_tokens == 0

    @property
    def is_resident(self) -> bool:
        """Admitted and not ended: it holds blocks of its own right."""
        return self.phase not in HOLDS_NOTHING and self.phase not in HAS_ENDED

    @property
    def can_decode(self) -> bool:
        """A request that has all its tokens is not scheduled again; it waits for the runtime's finish."""
        is_in_line = self.phase in (Phase.PREFILL_DONE, Phase.DECODING)
        return is_in_line and self.num_results_out == 0 and len(self.tokens) < self.limit_tokens

    def prefixes(self, prefix_granularity: int, num_grains: int) -> list[Prefix]:
        ends = [(grain + 1) * prefix_granularity for grain in range(num_grains)]
        return [Prefix(self.submission.extra_keys, tuple(self.tokens[:end])) for end in ends]
