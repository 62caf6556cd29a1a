"""What a prefill node refuses to act on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.handoff_values import ID, done, grant, start

from cache_runtime.recipes.spec import CacheFamily, CacheRetention
from cache_runtime.transfer.schema import GroupSchema
from model_runtime.sampler import SampledToken, SamplingParams
from node_runtime.errors import InvalidRequest
from node_runtime.handoff.checks import GrantedGroup, check_done, check_grant, check_start
from node_runtime.handoff.messages import GroupGrant, HandoffTimings, Start

LIMITS = {
    "full": GrantedGroup(group_id="full", block_granularity=4, num_peer_blocks=10),
    "fine": GrantedGroup(group_id="fine", block_granularity=2, num_peer_blocks=6),
}
FULL = GroupGrant(group_id="full", first_slot=1, block_ids=(3, 9))
FINE = GroupGrant(group_id="fine", first_slot=2, block_ids=(1, 2, 5))


def check(from_token: int = 4, groups: tuple[GroupGrant, ...] = (FULL, FINE), num_prompt_tokens: int = 9) -> None:
    check_grant(
        grant(from_token=from_token, groups=groups),
        num_prompt_tokens=num_prompt_tokens,
        prefix_granularity=4,
        groups=LIMITS,
    )


def test_a_grant_for_exactly_the_missing_part_is_taken_in_any_order_of_groups() -> None:
    check()
    check(groups=(FINE, FULL))


def changed(group: GroupGrant, **changes: object) -> GroupGrant:
    fields = {"group_id": group.group_id, "first_slot": group.first_slot, "block_ids": group.block_ids}
    return GroupGrant(**{**fields, **changes})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"from_token": 3}, "from_token: 3 given, a multiple of 4 below 9"),
        ({"from_token": 12}, "from_token: 12 given"),
        ({"from_token": 8, "num_prompt_tokens": 8}, "from_token: 8 given, a multiple of 4 below 8"),
        ({"groups": (FULL,)}, r"groups: \['full'\] given, \['fine', 'full'\] required"),
        ({"groups": (FULL, FINE, FINE)}, "groups"),
        ({"groups": (changed(FULL, group_id="ssm"), FINE)}, "ssm"),
        ({"groups": (changed(FULL, first_slot=0), FINE)}, r'"full" slots: \[0, 2\) given, \[1, 3\) required'),
        ({"groups": (changed(FULL, block_ids=(3,)), FINE)}, r"slots: \[1, 2\) given"),
        ({"groups": (changed(FULL, block_ids=(3, 4, 5)), FINE)}, r"slots: \[1, 4\) given"),
        ({"groups": (changed(FULL, block_ids=(3, 10)), FINE)}, r"block_ids: 10 is outside \[1, 10\)"),
        ({"groups": (changed(FULL, block_ids=(0, 3)), FINE)}, r"block_ids: 0 is outside"),
        ({"groups": (changed(FULL, block_ids=(3, 3)), FINE)}, "granted twice"),
    ],
)
def test_any_other_grant_is_refused_by_field_and_limit(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check(**arguments)


def test_a_prompt_shorter_than_a_block_needs_one_block() -> None:
    groups = (changed(FULL, first_slot=0, block_ids=(3,)), changed(FINE, first_slot=0, block_ids=(1, 2)))
    check(from_token=0, groups=groups, num_prompt_tokens=3)


def schema(**changes: object) -> GroupSchema:
    fields: dict[str, object] = {
        "group_id": "g",
        "family": CacheFamily.HISTORY,
        "retention": CacheRetention.FULL_HISTORY,
        "block_granularity": 4,
    }
    return GroupSchema(**{**fields, **changes})


def sliding(window_tokens: int, **changes: object) -> GroupSchema:
    return schema(retention=CacheRetention.SLIDING_WINDOW, sliding_window_tokens=window_tokens, **changes)


@pytest.mark.parametrize(
    ("group", "from_token", "slots"),
    [
        (schema(), 8, (2, 10)),
        (sliding(9), 8, (7, 10)),  # the next token sees 8 before its own: [30, 38)
        (sliding(9), 32, (8, 10)),  # the hit reaches further than what has expired
        (sliding(3), 8, (9, 10)),
        (sliding(100), 8, (2, 10)),
        (sliding(9, replayable=True), 32, (7, 10)),
        (schema(family=CacheFamily.STATE), 8, (9, 10)),
    ],
)
def test_the_slots_of_a_grant_are_what_is_neither_hit_nor_expired(
    group: GroupSchema, from_token: int, slots: tuple[int, int]
) -> None:
    assert GrantedGroup.of(group, 10).slots(from_token, 38) == slots


def test_a_grant_of_expired_slots_is_refused_with_both_ranges() -> None:
    limits = {"g": GrantedGroup.of(sliding(9), 20)}
    wide = GroupGrant(group_id="g", first_slot=2, block_ids=tuple(range(1, 9)))
    with pytest.raises(InvalidRequest, match=r'group "g" slots: \[2, 10\) given, \[7, 10\) required'):
        check_grant(grant(from_token=8, groups=(wide,)), num_prompt_tokens=38, prefix_granularity=4, groups=limits)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ((1, 50), r"token 50 is outside \[0, 50\)"),
        ((-1, 3), "token -1"),
        (tuple(range(9)), "prompt: 9 tokens given, at most 8"),
    ],
)
def test_a_prompt_outside_vocabulary_or_context_is_refused(tokens: tuple[int, ...], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_start(start(token_ids=tokens), vocab_size=50, context_tokens=9)


@pytest.mark.parametrize(
    ("num_tokens", "sampling", "words"),
    [
        (1, SamplingParams(logit_bias=((50, 1.0),)), r"sampling.logit_bias: token 50 is outside \[0, 50\)"),
        (7000, SamplingParams(num_prompt_logprobs=20), "num_prompt_logprobs: 20 given for 7000 tokens, 147000 values"),
    ],
)
def test_sampling_that_no_client_may_ask_for_is_refused_of_a_decode_node_too(
    num_tokens: int, sampling: SamplingParams, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_start(start(token_ids=(1,) * num_tokens, sampling=sampling), vocab_size=50, context_tokens=8000)


LOGPROBS = tuple(SampledToken(token_id=token) for token in (2, 3, 4, 5))  # the prompt behind its first token


@pytest.mark.parametrize("given", [(), LOGPROBS])
def test_prompt_logprobs_that_were_asked_for_are_taken_and_an_older_release_sends_none(
    given: tuple[SampledToken, ...],
) -> None:
    wanted = start(sampling=SamplingParams(num_prompt_logprobs=0))
    check_done(replace(done(), prompt_logprobs=given), wanted, vocab_size=50, num_granted_blocks=2)


@pytest.mark.parametrize(
    ("num_wanted", "given", "num_tokens"),
    [(None, LOGPROBS, 4), (0, LOGPROBS[1:], 3), (0, (*LOGPROBS[:3], SampledToken(token_id=6)), 4)],
    ids=["nobody asked for them", "some are missing", "of another prompt"],
)
def test_prompt_logprobs_that_are_not_those_of_the_prompt_are_refused(
    num_wanted: int | None, given: tuple[SampledToken, ...], num_tokens: int
) -> None:
    opened = start(sampling=SamplingParams(num_prompt_logprobs=num_wanted))
    with pytest.raises(InvalidRequest, match=f"prompt_logprobs: of {num_tokens} tokens that are not the prompt's"):
        check_done(replace(done(), prompt_logprobs=given), opened, vocab_size=50, num_granted_blocks=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"handoff_id": b"short"}, "handoff_id: 5 bytes"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "r" * 129}, "129 bytes given, at most 128"),
        ({"request_id": "a\nb"}, "request_id: must be printable"),
        ({"token_ids": ()}, "token_ids: empty"),
        ({"extra_keys": (b"k",) * 9}, "9 given, at most 8"),
        ({"extra_keys": (b"k" * 65,)}, "65 bytes given, at most 64"),
    ],
)
def test_a_malformed_start_cannot_be_made(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        start(**changes)


def test_a_start_keeps_what_it_was_given() -> None:
    assert isinstance(start(extra_keys=(b"salt",)), Start)
    assert start().handoff_id == ID


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["queue_ms", "compute_ms", "transfer_ms", "transfer_exposed_ms"])
def test_a_timing_that_no_clock_can_show_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"timings.{name}: .* finite and >= 0"):
        HandoffTimings(**{name: value})
