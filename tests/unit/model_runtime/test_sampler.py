"""The sampler: what is kept, what is drawn, and that nothing but seed and position decides."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from model_runtime.request_text import RequestText
from model_runtime.sampler import (
    BrokenLogits,
    LogitsError,
    SampledToken,
    SamplingParams,
    adjusted,
    sample,
    sample_row,
    score,
    uniform,
)


def row(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities)).astype(np.float32)


def draw_many(logits: np.ndarray, params: SamplingParams, count: int = 4000) -> np.ndarray:
    ids = [sample(logits, params, position).token_id for position in range(count)]
    return np.bincount(ids, minlength=logits.size) / count


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(np.array([0.0, 3.0, 3.0, 1.0], np.float32), SamplingParams(), 0).token_id == 1


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    logits = np.array([0.0, 3.0, 3.0, 1.0], np.float32)
    assert {sample(logits, SamplingParams(temperature=5.0, top_k=1), p).token_id for p in range(50)} == {1}


def test_frequencies_follow_the_softmax() -> None:
    drawn = draw_many(row(0.5, 0.3, 0.2), SamplingParams(temperature=1.0))
    assert np.abs(drawn - [0.5, 0.3, 0.2]).max() < 0.03


def test_temperature_sharpens_the_distribution() -> None:
    drawn = draw_many(row(0.5, 0.3, 0.2), SamplingParams(temperature=0.5))
    expected = np.array([0.25, 0.09, 0.04]) / 0.38
    assert np.abs(drawn - expected).max() < 0.03


def test_top_k_keeps_the_most_likely_and_lower_ids_among_equals() -> None:
    drawn = draw_many(row(0.1, 0.2, 0.2, 0.3, 0.2), SamplingParams(temperature=1.0, top_k=3))
    assert np.flatnonzero(drawn).tolist() == [1, 2, 3]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = row(0.05, 0.5, 0.15, 0.3)
    assert np.flatnonzero(draw_many(logits, SamplingParams(temperature=1.0, top_p=0.4))).tolist() == [1]
    assert np.flatnonzero(draw_many(logits, SamplingParams(temperature=1.0, top_p=0.7))).tolist() == [1, 3]
    assert np.flatnonzero(draw_many(logits, SamplingParams(temperature=1.0, top_p=0.94))).tolist() == [1, 2, 3]


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = row(0.1, 0.4, 0.2, 0.3)
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
    assert np.flatnonzero(draw_many(logits, params)).tolist() == [1]


def test_what_is_not_allowed_is_not_sampled_and_the_rest_keeps_its_proportions() -> None:
    logits, allowed = row(0.5, 0.3, 0.15, 0.05), np.array([False, True, False, True])
    assert sample(logits, SamplingParams(allowed=allowed), 0).token_id == 1
    drawn = draw_many(logits, SamplingParams(temperature=1.0, allowed=allowed))
    assert np.abs(drawn - [0, 0.3 / 0.35, 0, 0.05 / 0.35]).max() < 0.03
    # What is kept is chosen among the allowed ones.
    assert draw_many(logits, SamplingParams(temperature=1.0, top_k=2, allowed=allowed), 500)[3] > 0
    assert draw_many(logits, SamplingParams(temperature=1.0, top_p=0.5, allowed=allowed), 500)[1] == 1
    token = sample(logits, SamplingParams(allowed=allowed, num_logprobs=1), 0)
    assert token.logprob == pytest.approx(math.log(0.3), abs=1e-5)
    assert token.top_logprobs[0][0] == 0
    with pytest.raises(LogitsError):
        sample(logits, SamplingParams(allowed=np.zeros(4, np.bool_)), 0)


def test_a_token_is_a_function_of_seed_and_position_alone() -> None:
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=9)
    forward = [sample(logits, params, position).token_id for position in range(20)]
    backward = [sample(logits, params, position).token_id for position in reversed(range(20))]
    assert forward == backward[::-1]
    assert len(set(forward)) > 10
    other = [sample(logits, SamplingParams(temperature=1.0, seed=10), position).token_id for position in range(20)]
    assert other != forward


def test_the_uniform_stream_is_pinned() -> None:
    """A prefill and a decode node of different builds must continue one another's streams."""
    assert [uniform(0, 0), uniform(0, 1), uniform(2**64 - 1, 7)] == [
        0.8833108082136426,
        0.43152799704850997,
        0.7741445495399422,
    ]


def test_uniform_numbers_are_spread_over_seeds_and_positions() -> None:
    for values in ([uniform(5, p) for p in range(4000)], [uniform(s, 5) for s in range(4000)]):
        assert all(0 <= value < 1 for value in values)
        counts, _ = np.histogram(values, bins=10, range=(0, 1))
        assert counts.min() > 330
        assert counts.max() < 470


def test_a_token_with_zero_probability_is_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf], np.float32)
    drawn = draw_many(logits, SamplingParams(temperature=1.0))
    assert np.flatnonzero(drawn).tolist() == [1, 3]


def test_logprobs_are_of_the_raw_distribution_whatever_the_temperature() -> None:
    logits = row(0.1, 0.4, 0.2, 0.3)
    sampled = sample(logits, SamplingParams(temperature=0.1, top_k=1, num_logprobs=3), 0)
    assert sampled.token_id == 1
    assert sampled.logprob == pytest.approx(math.log(0.4), abs=1e-6)
    assert [token for token, _ in sampled.top_logprobs] == [1, 3, 2]
    assert [value for _, value in sampled.top_logprobs] == pytest.approx(np.log([0.4, 0.3, 0.2]), abs=1e-6)


def test_zero_logprobs_reports_the_token_only_and_none_reports_nothing() -> None:
    logits = row(0.9, 0.1)
    assert sample(logits, SamplingParams(num_logprobs=0), 0).top_logprobs == ()
    assert sample(logits, SamplingParams(num_logprobs=0), 0).logprob == pytest.approx(math.log(0.9), abs=1e-6)
    assert sample(logits, SamplingParams(), 0).logprob is None


def test_equal_logprobs_are_listed_by_id() -> None:
    sampled = sample(np.zeros(6, np.float32), SamplingParams(num_logprobs=3), 0)
    assert [token for token, _ in sampled.top_logprobs] == [0, 1, 2]


def test_a_maximum_that_is_known_counts_for_logits_as_they_are_and_for_no_others() -> None:
    logits = np.array([0.0, 3.0, 2.0, 1.0], np.float32)
    assert sample(logits, SamplingParams(), 0, 1).token_id == 1
    assert sample(logits, SamplingParams(logit_bias=((2, 5.0),)), 0, 1).token_id == 2
    assert sample(logits, SamplingParams(allowed=np.array([True, False, False, True])), 0, 1).token_id == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_an_error_instead_of_a_token(bad: float) -> None:
    with pytest.raises(LogitsError, match="position 3"):
        sample(np.array([0.0, bad, 1.0], np.float32), SamplingParams(), 3)
    outcome = sample_row(np.array([0.0, bad, 1.0], np.float32), SamplingParams(), 3)
    assert isinstance(outcome, BrokenLogits)
    assert outcome.reason == f"logits at position 3 have the maximum {bad} at token 1"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_have_no_log_probabilities_whatever_may_be_sampled(bad: float) -> None:
    logits, allowed = np.array([0.0, bad, 1.0], np.float32), np.array([True, False, True])
    assert sample(logits, SamplingParams(allowed=allowed), 3).token_id == 2
    with pytest.raises(LogitsError, match="no log-probabilities"):
        sample(logits, SamplingParams(allowed=allowed, num_logprobs=1), 3)
    with pytest.raises(LogitsError, match="no log-probabilities"):
        score(logits, 0, 1)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", float("nan"), "at least 0"),
        ("temperature", float("inf"), "finite"),
        ("temperature", -0.5, "at least 0, got -0.5"),
        ("top_k", 0, "at least 1, got 0"),
        ("top_p", 0.0, r"\(0, 1\], got 0.0"),
        ("top_p", 1.5, r"\(0, 1\], got 1.5"),
        ("top_p", float("nan"), r"\(0, 1\]"),
        ("seed", -1, r"\[0, 2\^64\), got -1"),
        ("seed", 2**64, r"\[0, 2\^64\)"),
        ("num_logprobs", -1, r"\[0, 20\], got -1"),
        ("num_logprobs", 21, r"\[0, 20\], got 21"),
    ],
)
def test_bad_parameters_are_refused_naming_field_and_limit(field: str, value: float, limit: str) -> None:
    with pytest.raises(ValueError, match=f"{field}.*{limit}"):
        SamplingParams(**{field: value})


def text_of(prompt: list[int], output: list[int]) -> RequestText:
    return RequestText(np.array([*prompt, *output], np.int32), num_output_tokens=len(output))


def test_penalties_and_biases_change_what_they_say_and_in_that_order() -> None:
    logits = np.array([2.0, -2.0, 4.0, 1.0, 0.5], np.float32)
    params = SamplingParams(
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias=((2, 10.0), (4, -1.0)),
        text=text_of([0, 1], [2, 2, 1]),
    )
    # 0: prompt. 1: prompt, and once in the output. 2: twice in the output. 3 and 4: nowhere.
    expected = [2.0 / 2, -2.0 * 2 - 0.5 - 0.25, 4.0 / 2 - 2 * 0.5 - 0.25 + 10.0, 1.0, 0.5 - 1.0]
    assert adjusted(logits, params).tolist() == expected
    assert logits.tolist() == [2.0, -2.0, 4.0, 1.0, 0.5]
    token = sample(logits, replace(params, num_logprobs=1), 5)
    assert token.token_id == 2
    # What the model itself thought of it.
    assert token.logprob == pytest.approx(float(logits[2]) - math.log(float(np.exp(logits).sum())))


def test_a_text_that_grows_is_penalised_as_it_stands() -> None:
    logits = np.zeros(3, np.float32)
    params = SamplingParams(frequency_penalty=1.0, text=text_of([0], []))
    picked = []
    for position in range(6):
        picked.append(sample(logits, params, position).token_id)
        params.text.append(picked[-1])
    assert picked == [0, 1, 2, 0, 1, 2]


def test_without_wishes_the_row_is_left_alone_and_penalties_without_a_text_are_a_defect() -> None:
    logits = np.zeros(3, np.float32)
    assert adjusted(logits, SamplingParams(num_prompt_logprobs=1, text=text_of([1], []))) is logits
    with pytest.raises(ValueError, match="text of the request"):
        sample(logits, SamplingParams(presence_penalty=1.0), 0)


def test_a_prompt_is_told_once_all_of_it_is_scored() -> None:
    text = text_of([4, 5, 6], [])
    text.keep_score(2, SampledToken(token_id=6, logprob=-1.0))
    assert not text.is_scored
    with pytest.raises(ValueError, match="position 1 of a prompt of 3"):
        text.scores()
    text.keep_score(1, SampledToken(token_id=5, logprob=-2.0))
    assert [token.token_id for token in text.scores()] == [5, 6]
    assert text_of([4], []).scores() == ()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"repetition_penalty": 0.0078}, r"repetition_penalty must be in \[0\.0078125, 10"),
        ({"frequency_penalty": 2.1}, r"frequency_penalty must be in \[-2.0, 2.0\], got 2.1"),
        ({"presence_penalty": math.nan}, "presence_penalty must be"),
        ({"logit_bias": ((3, 100.5),)}, "logit_bias of token 3 must be"),
        ({"num_prompt_logprobs": 21}, "num_prompt_logprobs must be"),
    ],
)
def test_wishes_out_of_bounds_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**values)
