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
from model_runtime.sampler import SamplingParams, score


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """Inputs of one row, at positions [begin_position, begin_position + num_tokens), the first one `first_token`-th of
    all inputs of the pass.
    """

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
    for request_id, begin, length in zip(request_ids, begins.tolist(), lengths.tolist(), strict=True):
        params = sampling.get(request_id)
        if params is not None and params.num_prompt_logprobs is not None and params.text is not None:
            # The last token of the prompt scores what is sampled.
            num_tokens = min(begin + length, len(params.text.prompt) - 1) - begin
            if num_tokens > 0:
                rows.append(
                    ScoredRow(
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


def keep_scores(rows: Sequence[ScoredRow], logits: npt.NDArray[np.float32]) -> None:
    """Leaves in the texts what logits float32[num_scored, vocab], in the order of `scored_tokens`, say."""
    index = 0
    for row in rows:
        for position in range(row.begin_position + 1, row.begin_position + 1 + row.num_tokens):
            row.text.keep_score(position, score(logits[index], row.text.prompt[position], row.num_alternatives))
            index += 1
