"""A live request: what it wants, where it stands and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from reference_model.eviction_policies import PromptUses
from reference_model.group_policies import Boundary
from reference_model.groups import Prefix
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
    """`num_prompt_tokens`: what a prefill computes; a retraction adds what was generated. `limit_tokens`: prompt and
    completion, where it is scheduled no further. `num_retractions`: for want of memory; `retraction_epoch` rises with
    every retraction of any request. `is_secured`: what its admission secured covers all that it may still generate.
    `results_out`: of the rows whose results have not landed the most tokens that each can bring, oldest first.
    `reserve_tokens`: room that the next decode step is to make. `num_overtakes`: younger prompts admitted while this
    one did not fit. `num_covered_tokens`: the tables have slots for as many. `promotion_tokens`: where its prompt is to
    be stopped because others share it up to there, 0 for nowhere. `boundary_tokens` is the newest grain boundary that a
    chunk or a landing reached, `checkpoint_tokens` where it computed a state into a block, 0 for nowhere."""

    submission: Submission
    is_remote: bool
    phase: Phase
    tokens: list[int]
    num_prompt_tokens: int
    limit_tokens: int
    num_retractions: int = 0
    retraction_epoch: int = 0
    is_secured: bool = False
    results_out: list[int] = field(default_factory=list)
    reserve_tokens: int = 0
    is_granted: bool = False
    did_not_fit: bool = False
    num_overtakes: int = 0
    slot: int = 0
    epoch: int = 0
    num_hit_tokens: int = 0
    hits: tuple[int, int, int] = (0, 0, 0)  # device, host, storage
    num_computed_tokens: int = 0
    num_covered_tokens: int = 0
    num_published_grains: int = 0
    promotion_tokens: int = 0
    boundary_tokens: int = 0
    boundary: Boundary = Boundary.CHUNK
    checkpoint_tokens: int = 0
    uses: PromptUses | None = None
    tables: list[Table] = field(default_factory=list)

    @staticmethod
    def of(submission: Submission, role: Role, limit_tokens: int) -> Request:
        """On the decode role a peer fills the prompt, and nothing starts before it is ready, unless the submission
        asks to be computed here."""
        is_remote = role is Role.DECODE and not submission.local_prefill
        phase = Phase.AWAITING_READY if is_remote else Phase.WAITING
        return Request(submission, is_remote, phase, list(submission.tokens), len(submission.tokens), limit_tokens)

    @property
    def request_id(self) -> str:
        return self.submission.request_id

    @property
    def is_resident(self) -> bool:
        """Admitted and not ended: it holds blocks of its own right."""
        return self.phase not in HOLDS_NOTHING and self.phase not in HAS_ENDED

    @property
    def num_wanted_tokens(self) -> int:
        return self.limit_tokens - len(self.tokens)

    @property
    def has_output(self) -> bool:
        return len(self.tokens) > len(self.submission.tokens)

    @property
    def is_complete(self) -> bool:
        """Retracted when nothing was left to generate: it waits for the runtime's finish."""
        return self.phase is Phase.RETRACTED and self.has_output and self.num_wanted_tokens <= 0

    def decode_width(self, verify_width: int) -> int:
        """Inputs of its next decode row, no more than may still be generated: each result that is out brings one token
        at least. One that has all its tokens is not scheduled again; it waits for the runtime's finish. The first row
        may follow the last chunk before its result."""
        if self.phase not in (Phase.AWAITING_RESULT, Phase.PREFILL_DONE, Phase.DECODING):
            return 0
        return max(0, min(verify_width, self.num_wanted_tokens - len(self.results_out)))

    def prefixes(self, prefix_granularity: int, num_grains: int) -> list[Prefix]:
        ends = [(grain + 1) * prefix_granularity for grain in range(num_grains)]
        return [Prefix(self.submission.extra_keys, tuple(self.tokens[:end])) for end in ends]
