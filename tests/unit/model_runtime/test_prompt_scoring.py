"""Scores of prompts that share a pass: each prompt gets its own, and one that has none spoils no other."""

from __future__ import annotations

import numpy as np

from model_runtime.prompt_scoring import keep_scores, scored_rows, scored_tokens
from model_runtime.request_text import RequestText
from model_runtime.sampler import SamplingParams


def params(prompt: list[int]) -> SamplingParams:
    return SamplingParams(num_prompt_logprobs=1, text=RequestText(np.array(prompt, np.int32)))


def test_a_row_whose_prompt_cannot_be_scored_is_named_and_the_others_are_scored() -> None:
    sampling = {"a": params([1, 2, 3]), "b": params([4, 5, 6, 7]), "free": SamplingParams(), "c": params([2, 1])}
    begins, lengths = np.zeros(4, np.int32), np.array([3, 4, 5, 2], np.int32)
    rows = scored_rows(["a", "b", "free", "c"], begins, lengths, sampling)
    assert scored_tokens(rows).tolist() == [0, 1, 3, 4, 5, 12]
    logits = np.zeros((6, 8), np.float32)
    logits[3, 2] = np.nan
    broken = keep_scores(rows, logits)
    assert list(broken) == [1]
    assert broken[1].reason == "the prompt cannot be scored: logits with the maximum nan have no log-probabilities"
    for name in ("a", "c"):
        text = sampling[name].text
        assert text is not None
        assert text.is_scored
        assert [score.logprob for score in text.scores()] == [-np.log(8)] * (len(text.prompt) - 1)
