"""Retraction: when somebody gives way, who, and to whom."""

from __future__ import annotations

import pytest

import scheduler_core as sc

from .builders import Runtime, full_group, rows_of, spec
from .full_pools import line_of, num_blocks, room_of, runtime_of, start, two_that_fill_the_pool

# When somebody gives way.


@pytest.mark.behaviour("M1")
@pytest.mark.behaviour("M3")
def test_a_new_prompt_that_does_not_fit_makes_a_decode_give_way_in_the_same_plan() -> None:
    runtime = runtime_of(num_lcm_blocks=6)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    runtime.step()
    runtime.scheduler.submit([spec("n", range(50, 66), max_new_tokens=1)])
    plan = runtime.step()
    assert plan.retracted == ["a"]
    assert rows_of(plan) == [("n", 0, 16)]


@pytest.mark.behaviour("M1")
def test_nobody_gives_way_while_a_prompt_gets_on() -> None:
    runtime = runtime_of(num_lcm_blocks=10, token_budget=8)
    runtime.scheduler.submit([spec("x", 8, max_new_tokens=None)])
    for _ in range(3):
        runtime.step()
    runtime.scheduler.submit([spec("long", range(50, 74), max_new_tokens=4)])
    assert rows_of(runtime.step()) == [("long", 0, 7), ("x", 10, 1)]
    assert rows_of(runtime.step()) == [("long", 7, 7), ("x", 11, 1)]
    for begin, length in ((14, 8), (22, 2)):  # x needs a fourth block, and there is none
        plan = runtime.step()
        assert rows_of(plan) == [("long", begin, length)]
        assert plan.retracted == []
    assert runtime.step().retracted == ["x"]


@pytest.mark.behaviour("M2")
def test_a_readmission_that_does_not_fit_retracts_nobody_and_seals_remote_admissions() -> None:
    runtime = two_that_fill_the_pool(sc.Role.DECODE)
    assert runtime.step().retracted == ["a"]
    runtime.scheduler.submit([spec("n", range(200, 203), max_new_tokens=1)])
    runtime.scheduler.advance([sc.ReadyEvent("n")])
    for _ in range(3):
        plan = runtime.step()
        assert plan.retracted == []
        assert plan.remote_prefills == []
        assert [name for name, _, _ in rows_of(plan)] == ["b"]
    assert [name for name, _, _ in rows_of(runtime.finish("b"))] == ["a"]


@pytest.mark.behaviour("M7")
@pytest.mark.behaviour("L10")
def test_nobody_gives_way_for_what_quarantine_will_bring_back() -> None:
    runtime = runtime_of(sc.Role.DECODE, num_lcm_blocks=8)
    start(runtime, spec("x", 7, max_new_tokens=None))
    runtime.scheduler.submit([spec("r", range(50, 65), max_new_tokens=1)])
    runtime.scheduler.advance([sc.ReadyEvent("r")])
    assert [grant.request_id for grant in runtime.step().remote_prefills] == ["r"]
    runtime.scheduler.advance([sc.FailedEvent("r")])
    runtime.scheduler.submit([spec("n", range(80, 95), max_new_tokens=1)])
    runtime.scheduler.advance([sc.ReadyEvent("n")])
    assert runtime.scheduler.capacity().quarantined_lcm_blocks == 4
    plan = runtime.step()
    assert (plan.retracted, plan.remote_prefills) == ([], [])
    assert rows_of(plan)[0][0] == "x"
    runtime.scheduler.advance([sc.QuiescedEvent("r")])
    assert [grant.request_id for grant in runtime.step().remote_prefills] == ["n"]


@pytest.mark.behaviour("L10")
def test_somebody_gives_way_for_what_quarantine_will_not_bring_back() -> None:
    runtime = runtime_of(sc.Role.DECODE, num_lcm_blocks=8)
    start(runtime, spec("x", 7, max_new_tokens=None))
    runtime.scheduler.submit([spec("r", range(50, 65), max_new_tokens=1)])
    runtime.scheduler.advance([sc.ReadyEvent("r")])
    runtime.step()
    runtime.scheduler.advance([sc.FailedEvent("r")])
    runtime.scheduler.submit([spec("n", range(80, 110), max_new_tokens=1)])
    runtime.scheduler.advance([sc.ReadyEvent("n")])
    plan = runtime.step()
    assert plan.retracted == ["x"]  # eight blocks are everything


# Who gives way.


@pytest.mark.behaviour("M17")
@pytest.mark.behaviour("M3")
@pytest.mark.behaviour("M4")
def test_the_younger_of_two_equals_gives_way_and_the_older_decodes_in_the_same_plan() -> None:
    runtime = two_that_fill_the_pool()
    for name in ("b", "a"):
        assert num_blocks(runtime, name) == 5
        assert "tokens=17+4 " in line_of(runtime, name)
    assert runtime.scheduler.capacity().empty_lcm_blocks == 0
    plan = runtime.step()
    assert plan.retracted == ["a"]
    assert rows_of(plan) == [("b", 20, 1)]
    assert line_of(runtime, "a") == "request a retracted tokens=21+0 retractions=1"
    assert runtime.scheduler.capacity().num_waiting == 1


@pytest.mark.behaviour("M4")
def test_who_frees_most_parents_gives_way_first() -> None:
    runtime = runtime_of(num_lcm_blocks=10)
    lengths = {"small": 4, "big": 16, "middle": 8}
    runtime.scheduler.submit(
        [spec(name, range(100 * length, 101 * length), max_new_tokens=None) for name, length in lengths.items()]
    )
    runtime.step()
    runtime.scheduler.submit([spec("n", range(50, 65), max_new_tokens=1)])
    plan = runtime.step()
    assert plan.retracted == ["big"]
    assert {name for name, _, _ in rows_of(plan)} == {"small", "middle", "n"}


@pytest.mark.behaviour("M4")
def test_blocks_that_others_share_free_nothing() -> None:
    runtime = runtime_of(num_lcm_blocks=12)
    runtime.scheduler.submit([spec("long", 17, max_new_tokens=None), spec("alone", range(50, 59), max_new_tokens=None)])
    runtime.step()
    runtime.step()  # publishes
    runtime.scheduler.submit([spec("shares", [*range(16), 99], max_new_tokens=None)])
    runtime.step()
    assert runtime.admissions["shares"] == 16
    runtime.scheduler.submit([spec("n", range(70, 88), max_new_tokens=1)])
    assert runtime.step().retracted == ["alone"]


@pytest.mark.behaviour("M4")
def test_an_incomplete_prefill_gives_way_before_whoever_generates() -> None:
    runtime = runtime_of(sc.Role.DECODE, num_lcm_blocks=11, token_budget=8)
    start(runtime, spec("x", 8, max_new_tokens=None), spec("s", [1], max_new_tokens=11))
    for _ in range(4):
        runtime.step()
    runtime.scheduler.submit([spec("l", range(50, 70), max_new_tokens=None, local_prefill=True)])
    assert rows_of(runtime.step()) == [("l", 0, 8)]
    plan = runtime.step()
    assert plan.retracted == ["l"]
    assert rows_of(plan) == [("s", 5, 1), ("x", 12, 1)]


@pytest.mark.behaviour("M6")
def test_who_is_chosen_and_has_a_result_out_is_waited_for() -> None:
    runtime = runtime_of(num_lcm_blocks=8)
    runtime.scheduler.submit([spec("big", 15, max_new_tokens=None), spec("small", range(50, 57), max_new_tokens=None)])
    runtime.step()
    plan = runtime.plan()
    assert {name for name, _, _ in rows_of(plan)} == {"big", "small"}
    runtime.scheduler.submit([spec("n", range(70, 84), max_new_tokens=1)])
    runtime.scheduler.advance([sc.ResultEvent("small", [7])])
    waiting = runtime.plan()
    assert waiting.retracted == []  # small is worse, and would not be enough either
    assert rows_of(waiting) == [("small", 8, 1)]
    # Results of others block nothing.
    runtime.scheduler.advance([sc.ResultEvent("big", [7])])
    plan = runtime.plan()
    assert plan.retracted == ["big"]
    assert rows_of(plan) == [("n", 0, 14)]


@pytest.mark.behaviour("M6")
@pytest.mark.behaviour("J12")
def test_who_is_chosen_gets_no_further_row_when_plans_overlap() -> None:
    runtime = runtime_of(num_lcm_blocks=6, overlap_depth=1)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    first = runtime.plan()
    second = runtime.plan()
    runtime.land(first)
    runtime.scheduler.submit([spec("n", range(50, 66), max_new_tokens=1)])
    third = runtime.plan()
    assert rows_of(third) == [("a", 9, 1)]  # it was planned before anybody was looked for
    runtime.land(second)
    assert rows_of(runtime.plan()) == []
    runtime.land(third)
    plan = runtime.plan()
    assert plan.retracted == ["a"]
    assert rows_of(plan) == [("n", 0, 16)]


def test_who_was_chosen_goes_on_when_nobody_needs_its_blocks_any_more() -> None:
    runtime = runtime_of(num_lcm_blocks=6)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    runtime.step()
    out = runtime.plan()
    runtime.scheduler.submit([spec("n", range(50, 66), max_new_tokens=1)])
    assert runtime.plan().is_empty
    runtime.scheduler.advance([sc.AbortEvent("n")])
    runtime.land(out)
    assert rows_of(runtime.plan()) == [("a", 9, 1)]


@pytest.mark.behaviour("M12")
def test_if_nobody_can_give_way_the_scheduler_waits() -> None:
    runtime = runtime_of(num_lcm_blocks=6, token_budget=8)
    runtime.scheduler.submit([spec("a", 16, max_new_tokens=4)])
    out = runtime.plan()
    runtime.scheduler.submit([spec("n", range(50, 66), max_new_tokens=1)])
    for _ in range(3):
        assert runtime.plan().is_empty
    runtime.land(out)
    assert rows_of(runtime.step()) == [("a", 8, 8)]


# Who is exempt.


@pytest.mark.behaviour("M5")
@pytest.mark.behaviour("M15")
def test_headroom_grows_with_every_retraction_until_the_whole_generation_is_secured() -> None:
    groups = [full_group(block_granularity=64)]
    runtime = runtime_of(prefix_granularity=64, num_lcm_blocks=320, token_budget=2**20, cache_groups=groups)
    runtime.scheduler.submit([spec("a", 64, max_new_tokens=20_000)])
    runtime.step()
    assert room_of(runtime, "a") == 4096
    for num_generated, expected, is_exempt in ((5000, 8192, False), (12_000, 8000, True)):
        while f"+{num_generated} " not in line_of(runtime, "a").replace("tokens=64+", "+"):
            if "retractions" in line_of(runtime, "a") and _generated(runtime, "a") >= num_generated:
                break
            runtime.step()
        _displace(runtime, "a", 320)
        assert rows_of(runtime.step())[0][2] > 0
        assert expected <= room_of(runtime, "a") < expected + 64
        assert ("unsecured" in line_of(runtime, "a")) is not is_exempt
    runtime.scheduler.submit([spec("n", range(50_000, 50_000 + 64 * 300), max_new_tokens=1)])
    assert runtime.step().retracted == []


def _generated(runtime: Runtime, request_id: str) -> int:
    """Behind a submitted prompt of 64 tokens."""
    prompt, _, rest = line_of(runtime, request_id).partition("tokens=")[2].split()[0].partition("+")
    return int(prompt) + int(rest) - 64


def _displace(runtime: Runtime, request_id: str, num_lcm_blocks: int) -> None:
    """A prompt comes that needs nearly the whole pool, and goes again."""
    runtime.scheduler.submit([spec("n", range(50_000, 50_000 + 64 * (num_lcm_blocks - 20)), max_new_tokens=1)])
    assert runtime.step().retracted == [request_id]
    runtime.scheduler.advance([sc.FinishEvent("n")])


@pytest.mark.behaviour("M5")
def test_a_completion_within_the_headroom_is_exempt_at_once_and_an_undeclared_one_never() -> None:
    groups = [full_group(block_granularity=64)]
    runtime = runtime_of(prefix_granularity=64, num_lcm_blocks=320, token_budget=2**20, cache_groups=groups)
    for name, max_new_tokens, is_exempt in (("a", 4000, True), ("b", 6000, False), ("c", None, False)):
        runtime.scheduler.submit([spec(name, [ord(name)], max_new_tokens=max_new_tokens)])
        runtime.step()
        assert ("unsecured" in line_of(runtime, name)) is not is_exempt
    assert num_blocks(runtime, "c") == 1
    runtime.scheduler.advance([sc.FinishEvent("a"), sc.FinishEvent("c")])
    while "tokens=1+1000 " not in line_of(runtime, "b"):
        runtime.step()
    _displace(runtime, "b", 320)
    runtime.step()
    assert "unsecured" not in line_of(runtime, "b")
    assert 5000 <= room_of(runtime, "b") < 5064


@pytest.mark.behaviour("M5")
def test_one_that_gave_way_comes_back_only_where_it_gets_a_token_further() -> None:
    runtime = runtime_of(num_lcm_blocks=8, token_budget=8, enable_prefix_cache=False)
    runtime.scheduler.submit([spec("b", 15, max_new_tokens=1)])
    runtime.step()
    out = runtime.plan()  # b holds half of the pool for as long as its result is out
    runtime.scheduler.submit([spec("a", range(50, 66), max_new_tokens=None)])
    assert rows_of(runtime.step()) == [("a", 0, 8)]
    assert runtime.step().retracted == ["a"]  # behind its last chunk there is no room for a step
    for _ in range(3):
        assert runtime.step().is_empty
    runtime.land(out)
    last = runtime.finish("b")
    assert rows_of(last) == [("a", 0, 8)]
    runtime.land(last)
    assert rows_of(runtime.step()) == [("a", 8, 8)]
    assert rows_of(runtime.step()) == [("a", 16, 1)]


@pytest.mark.behaviour("M9")
@pytest.mark.behaviour("J14")
def test_a_round_that_runs_nothing_lets_an_exempt_request_give_way() -> None:
    runtime = runtime_of(num_lcm_blocks=6)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=2)])
    runtime.step()
    runtime.scheduler.submit([spec("n", range(50, 66), max_new_tokens=1)])
    plan = runtime.step()
    assert plan.retracted == []  # a decodes, so the round runs
    plan = runtime.step()
    assert plan.retracted == ["a"]  # it has all its tokens and only waits for its end
    assert rows_of(plan) == [("n", 0, 16)]
    assert runtime.step().is_empty  # nothing is left of a to compute
    assert runtime.finish("a").finished == ["a"]


@pytest.mark.behaviour("M9")
def test_the_last_resort_waits_for_what_is_out() -> None:
    runtime = runtime_of(num_lcm_blocks=6)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=2)])
    runtime.step()
    out = runtime.plan()
    runtime.scheduler.submit([spec("n", range(50, 66), max_new_tokens=1)])
    assert runtime.plan().is_empty
    runtime.land(out)
    assert runtime.plan().retracted == ["a"]


# To whom.


@pytest.mark.behaviour("M8")
def test_the_blocks_of_a_blocked_request_that_gives_way_itself_go_to_the_first_new_prompt() -> None:
    runtime = runtime_of(num_lcm_blocks=7)
    runtime.scheduler.submit([spec("s", 4, max_new_tokens=12), spec("x", range(50, 59), max_new_tokens=None)])
    for _ in range(4):
        runtime.step()
    runtime.scheduler.submit([spec("n", range(70, 76), max_new_tokens=1), spec("m", [99], max_new_tokens=1)])
    plan = runtime.step()
    assert plan.retracted == ["x"]
    assert rows_of(plan) == [("n", 0, 6), ("s", 7, 1)]


@pytest.mark.behaviour("M8")
def test_a_prompt_that_may_not_join_the_round_is_the_first_of_the_next() -> None:
    runtime = runtime_of(sc.Role.DECODE, num_lcm_blocks=8)
    start(runtime, spec("s", 4, max_new_tokens=8), spec("x", range(50, 59), max_new_tokens=None))
    runtime.scheduler.submit([spec("l", range(70, 82), max_new_tokens=1, local_prefill=True)])
    plan = runtime.step()
    assert plan.retracted == ["x"]
    assert [name for name, _, _ in rows_of(plan)] == ["s"]
    assert rows_of(runtime.step()) == [("l", 0, 12)]  # before x, which is a readmission


@pytest.mark.behaviour("M3")
def test_several_give_way_until_the_prompt_fits() -> None:
    runtime = runtime_of(num_lcm_blocks=9)
    runtime.scheduler.submit([spec(name, [ord(name)] * 5, max_new_tokens=None) for name in "abc"])
    runtime.step()
    runtime.scheduler.submit([spec("n", range(50, 78), max_new_tokens=1)])
    plan = runtime.step()
    assert plan.retracted == ["c", "b", "a"]
    assert rows_of(plan) == [("n", 0, 28)]


@pytest.mark.behaviour("K16")
@pytest.mark.behaviour("I4")
def test_a_plan_zeroes_nothing_of_a_row_that_was_taken_out_again() -> None:
    runtime = runtime_of(num_lcm_blocks=6)
    runtime.scheduler.submit([spec("a", 8, max_new_tokens=None)])
    for _ in range(5):
        runtime.step()  # its next row needs a fourth block
    runtime.scheduler.submit([spec("n", range(50, 73), max_new_tokens=1)])
    plan = runtime.step()
    assert plan.retracted == ["a"]
    assert rows_of(plan) == [("n", 0, 23)]
    zeroed = plan.zero_blocks[0].tolist()
    assert sorted(zeroed) == sorted(runtime.scheduler.block_tables("n")[0].tolist()) == [1, 2, 3, 4, 5, 6]
