"""Which tokens of a forward pass say how likely the prompt was, and what they say.

The logits of a prompt's token score the one behind it. A request whose prompt is scored must have computed all of it:
what a prefix cache supplied has no logits. Knows plans and texts, no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model_runtime.request_text import RequestText
from model_runtime.sampler import BrokenLogits, LogitsError, SamplingParams, score


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """Inputs of the `row`-th row, at positions [begin_position, begin_position + num_tokens), the first one
    `first_token`-th of all inputs of the pass.
    """

    row: int
    text: RequestText
    num_alternatives: int
    begin_position: int
    first_token: int
    num_tokens: int


def scored_rows(
    request_ids: Sequence[str],
    begins: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    sampling: Mapping[str, SamplingParams],
) -> tuple[ScoredRow, ...]:
    """The rows, int32[num_rows] each, that carry a part of a prompt that is to be scored."""
    rows = []
    first_token = 0
    spans = zip(request_ids, begins.tolist(), lengths.tolist(), strict=True)
    for row, (request_id, begin, length) in enumerate(spans):
        params = sampling.get(request_id)
        if params is not None and params.num_prompt_logprobs is not None and params.text is not None:
            # The last token of the prompt scores what is sampled.
            num_tokens = min(begin + length, len(params.text.prompt) - 1) - begin
            if num_tokens > 0:
                rows.append(
                    ScoredRow(
                        row=row,
                        text=params.text,
                        num_alternatives=params.num_prompt_logprobs,
                        begin_position=begin,
                        first_token=first_token,
                        num_tokens=num_tokens,
                    )
                )
        first_token += length
    return tuple(rows)


def scored_tokens(rows: Sequence[ScoredRow]) -> npt.NDArray[np.int64]:
    """int64[num_scored]: their inputs among all inputs of the pass, row by row."""
    spans = [np.arange(row.first_token, row.first_token + row.num_tokens, dtype=np.int64) for row in rows]
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)


def keep_scores(rows: Sequence[ScoredRow], logits: npt.NDArray[np.float32]) -> dict[int, BrokenLogits]:
    """Leaves in the texts what logits float32[num_scored, vocab], in the order of `scored_tokens`, say.

    The rows whose logits say nothing, by number; what their texts are left with is of no use.
    """
    broken = {}
    end = 0
    for row in rows:
        begin, end = end, end + row.num_tokens
        try:
            _keep_row(row, logits[begin:end])
        except LogitsError as error:
            broken[row.row] = BrokenLogits(reason=f"the prompt cannot be scored: {error}")
    return broken


def _keep_row(row: ScoredRow, logits: npt.NDArray[np.float32]) -> None:
    for offset, token_logits in enumerate(logits):
        position = row.begin_position + 1 + offset
        row.text.keep_score(position, score(token_logits, row.text.prompt[position], row.num_alternatives))
