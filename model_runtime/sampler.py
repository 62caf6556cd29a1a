"""From logits to tokens: pure arithmetic on one row at a time.

Knows no model, batch or request and keeps no state: the random number of a token is a function of the request's seed
and the token's position, so a request samples the same tokens wherever and next to whomever it runs. Needs numpy only,
so that a node without a compute library can check sampling parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from model_runtime.errors import ModelError
from model_runtime.output_form import OutputForm
from model_runtime.request_text import RequestText

MAX_LOGPROBS = 20
"""Most alternatives whose log-probability one request can ask for."""
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
# 2^-7, which a float32 has exactly. A logit that is divided by next to nothing is infinite, and of no use to anybody.
MIN_REPETITION_PENALTY = 0.0078125
MAX_REPETITION_PENALTY = 10.0

_UINT64_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15

Float32Row = npt.NDArray[np.float32]
Float64Row = npt.NDArray[np.float64]


class LogitsError(ModelError):
    """A row of logits without a finite maximum: the forward pass broke down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request picks tokens. Raises ValueError naming the field, its value and the limit.

    `temperature` 0 takes the most likely token. `top_k` keeps the k most likely tokens, then `top_p` the smallest set
    of them with at least that mass. `num_logprobs` None reports no log-probabilities, n that of the token and of the
    n most likely ones; `num_prompt_logprobs` likewise for each token of the prompt.

    Before all that the logits of tokens are changed, in this order: those of the prompt and the output by
    `repetition_penalty`, those of the output by `frequency_penalty` and `presence_penalty`, and those in `logit_bias`.
    `form` is that of the whole completion; of the next token it says what `allowed` does, bool[vocab_size] with None
    for everything: the others are not sampled. Log-probabilities know of none of it.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    num_logprobs: int | None = None
    form: OutputForm | None = None
    allowed: npt.NDArray[np.bool_] | None = field(default=None, compare=False, repr=False)
    num_prompt_logprobs: int | None = None
    # (token id, what is added to its logit), each token once.
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    # Set, and made longer, by whoever runs the request, where `needs_text`.
    text: RequestText | None = field(default=None, compare=False, repr=False)
    # Likewise: the LoRA adapter whose model it is that gives the logits; None: the model as it is.
    adapter: str | None = None

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def needs_text(self) -> bool:
        """Whether what is sampled or told depends on the tokens before."""
        return self.has_penalties or self.num_prompt_logprobs is not None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed <= _UINT64_MASK:
            raise ValueError(f"seed must be in [0, 2^64), got {self.seed}")
        for name, count in (("num_logprobs", self.num_logprobs), ("num_prompt_logprobs", self.num_prompt_logprobs)):
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise ValueError(f"{name} must be in [0, {MAX_LOGPROBS}], got {count}")
        self._check_adjustments()

    def _check_adjustments(self) -> None:
        # Written so that NaN fails as well.
        if not MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise ValueError(
                f"repetition_penalty must be in [{MIN_REPETITION_PENALTY}, {MAX_REPETITION_PENALTY}], got "
                f"{self.repetition_penalty}"
            )
        for name, penalty in (
            ("frequency_penalty", self.frequency_penalty),
            ("presence_penalty", self.presence_penalty),
        ):
            if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                raise ValueError(f"{name} must be in [-{MAX_PENALTY}, {MAX_PENALTY}], got {penalty}")
        for token_id, bias in self.logit_bias:
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise ValueError(
                    f"logit_bias of token {token_id} must be in [-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}], got {bias}"
                )


def adapters_of(sampling: Mapping[str, SamplingParams]) -> dict[str, str]:
    """The adapters of the requests that have one, by request id."""
    return {request_id: params.adapter for request_id, params in sampling.items() if params.adapter is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One token, picked or given. Log-probabilities are natural and of the model's own distribution, before penalties,
    biases, temperature and truncation.

    `top_logprobs` holds (token id, log-probability), most likely first, lower id first among equals.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLogits:
    """In the place of what a row of a pass would have given: its logits say nothing. Other rows are sound."""

    reason: str


RowOutcome: TypeAlias = SampledToken | BrokenLogits | None
"""Of one row of a pass; None: no token was wanted."""


def sample_row(
    logits: Float32Row, params: SamplingParams, position: int, most_likely: int | None = None
) -> SampledToken | BrokenLogits:
    """`sample` of one row among others, whose fate is not theirs."""
    try:
        return sample(logits, params, position, most_likely)
    except LogitsError as error:
        return BrokenLogits(reason=str(error))


def sample(logits: Float32Row, params: SamplingParams, position: int, most_likely: int | None = None) -> SampledToken:
    """Picks the token at `position` of prompt and completion from logits float32[vocab_size].

    `most_likely` is where the largest logit is, the first of equals, if somebody has looked already.
    Raises LogitsError when the logits, those of allowed tokens, have no finite maximum, and ValueError when penalties
    lack a text.
    """
    wanted = adjusted(logits, params)
    choices = wanted if params.allowed is None else np.where(params.allowed, wanted, -np.float32(np.inf))
    best = most_likely if choices is logits else None
    if best is None:
        best = int(np.argmax(choices))  # the first of equals
    if not math.isfinite(choices[best]):
        raise LogitsError(f"logits at position {position} have the maximum {choices[best]} at token {best}")
    greedy = params.temperature == 0.0 or params.top_k == 1
    token_id = best if greedy else _draw(choices, params, position)
    if params.num_logprobs is None:
        return SampledToken(token_id=token_id)
    return score(logits, token_id, params.num_logprobs)


def score(logits: Float32Row, token_id: int, num_alternatives: int) -> SampledToken:
    """How likely logits float32[vocab_size] make a token, and the most likely ones.

    Raises LogitsError when the logits have no finite maximum.
    """
    logprobs = _log_softmax(logits)
    top_ids = _most_likely(logprobs, num_alternatives)
    return SampledToken(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        top_logprobs=tuple((int(index), float(logprobs[index])) for index in top_ids),
    )


def adjusted(logits: Float32Row, params: SamplingParams) -> Float32Row:
    """A row with the penalties and biases of `params`, computed in float32; `logits` itself where there are none.

    Source: Keskar et al. 2019, "CTRL", section 4.1, for the repetition penalty, which divides positive logits and, as
    implementations do, multiplies negative ones; the OpenAI API reference for the other two and the bias.
    """
    if not params.logit_bias and not params.has_penalties:
        return logits
    row = logits.copy()
    if params.has_penalties:
        if params.text is None:
            raise ValueError("penalties need the text of the request")
        _penalise(row, params, params.text)
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        row[np.array(ids, dtype=np.int64)] += np.array(biases, dtype=np.float32)
    return row


def _penalise(row: Float32Row, params: SamplingParams, text: RequestText) -> None:
    if params.repetition_penalty != 1.0:
        ids, factor = text.seen_ids(), np.float32(params.repetition_penalty)
        row[ids] = np.where(row[ids] > 0, row[ids] / factor, row[ids] * factor)
    ids, counts = text.output_counts()
    row[ids] -= counts.astype(np.float32) * np.float32(params.frequency_penalty)
    row[ids] -= np.float32(params.presence_penalty)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else; 53 random bits.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators": the SplitMix64 output
    function, applied to the seed and then to the stream of that seed at index `position`.
    """
    state = (_mix(seed) + (position + 1) * _GOLDEN_GAMMA) & _UINT64_MASK
    return float(_mix(state) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
    return value ^ (value >> 31)


def _draw(logits: Float32Row, params: SamplingParams, position: int) -> int:
    """Inverse of the cumulative distribution over the kept tokens in order of their ids."""
    ids, weights = _kept_tokens(logits, params)
    cumulative = np.cumsum(weights)
    target = uniform(params.seed, position) * cumulative[-1]
    index = int(np.searchsorted(cumulative, target, side="right"))
    # Rounding may put the target on the total itself; the last token with any weight is meant then.
    last = int(np.flatnonzero(weights)[-1])
    return int(ids[min(index, last)])


def _kept_tokens(logits: Float32Row, params: SamplingParams) -> tuple[npt.NDArray[np.int64], Float64Row]:
    """Ids in ascending order, and their unnormalised probabilities."""
    scaled = logits.astype(np.float64) / params.temperature
    ids = np.arange(scaled.size)
    if params.top_k is not None and params.top_k < scaled.size:
        ids = np.sort(_most_likely(scaled, params.top_k))
        scaled = scaled[ids]
    weights = np.exp(scaled - scaled.max())
    if params.top_p < 1.0:
        nucleus = np.sort(_most_likely(weights, _nucleus_size(weights, params.top_p)))
        ids, weights = ids[nucleus], weights[nucleus]
    return ids, weights


def _nucleus_size(weights: Float64Row, top_p: float) -> int:
    descending = np.sort(weights)[::-1]
    cumulative = np.cumsum(descending)
    return min(int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left")) + 1, weights.size)


def _most_likely(values: Float64Row, count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest values, largest first; among equals the lower index comes first and is kept."""
    count = min(count, values.size)
    if count == 0:
        return np.empty(0, dtype=np.int64)
    threshold = np.partition(values, values.size - count)[values.size - count]
    candidates = np.flatnonzero(values >= threshold)  # more than count only by ties at the threshold
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]]


def _log_softmax(logits: Float32Row) -> Float64Row:
    highest = float(logits.max())
    if not math.isfinite(highest):
        raise LogitsError(f"logits with the maximum {highest} have no log-probabilities")
    shifted = logits.astype(np.float64) - highest
    return shifted - math.log(float(np.exp(shifted).sum()))
