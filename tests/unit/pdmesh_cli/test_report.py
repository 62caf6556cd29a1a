"""What is said about a finished request."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console, RenderableType

from pdmesh_cli import report
from pdmesh_cli.client_types import CachedTokens, Finish, FinishReason, Placement, Timings, Usage

_TIMINGS = Timings(
    prefill_queue_ms=2.0,
    prefill_compute_ms=610.0,
    transfer_ms=400.0,
    transfer_exposed_ms=100.0,
    transferred_bytes=46 * 2**20,
    transferred_runs=60,
    transferred_blocks=2,
    time_to_first_token_ms=655.4,
    decode_ms=1500.0,
)
_FINISH = Finish(
    reason=FinishReason.STOP,
    matched_token_id=2,
    matched_stop=None,
    usage=Usage(prompt_tokens=400, completion_tokens=21, cached=CachedTokens(prefill_device=64, decode_device=192)),
    timings=_TIMINGS,
)
_PLACEMENT = Placement(request_id="r", decode_node="decode-0", prefill_node="prefill-0", trace_id="")


def _report(placement: Placement, finish: Finish, *, width: int = 100, is_terminal: bool = False) -> str:
    console = Console(width=width, color_system=None, force_terminal=is_terminal)
    with console.capture() as capture:
        report.print_report(placement, finish, console)
    return capture.get()


def _text(renderable: RenderableType) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_disaggregated_request_tells_place_tokens_cache_speed_and_handoff() -> None:
    lines = _report(_PLACEMENT, _FINISH, width=40).splitlines()
    assert lines == [
        "ran      prefill on prefill-0, decode on decode-0",
        "tokens   400 prompt, 21 completion (stopped by token 2)",
        "cached   64 on the prefill node, 192 on the decode node",
        "speed    first token after 655 ms (queue 2, compute 610), then 75.0 ms per token",
        "handoff  46.0 MiB, 60 runs, 2 blocks; busy 400 ms, 100.0 ms of it after the compute (75 % hidden)",
    ]


def test_at_a_terminal_a_long_line_goes_on_below_its_beginning() -> None:
    lines = _report(_PLACEMENT, _FINISH, width=50, is_terminal=True).splitlines()
    assert [line[:9].strip() for line in lines] == ["ran", "tokens", "", "cached", "", "speed", "", "handoff", "", ""]
    assert all(len(line.rstrip()) <= 50 for line in lines)


def test_a_request_of_one_node_has_no_handoff() -> None:
    text = _report(dataclasses.replace(_PLACEMENT, prefill_node=""), _FINISH)
    assert "prefill and decode on decode-0" in text
    assert "handoff" not in text


def test_a_request_that_did_not_stay_where_it_was_placed_says_so() -> None:
    lines = _report(_PLACEMENT, dataclasses.replace(_FINISH, num_replacements=2)).splitlines()
    assert lines[0] == "began    prefill on prefill-0, decode on decode-0"
    assert lines[1] == "moved    2 times, because a node had failed or refused it"


def test_the_summary_has_one_line_per_request() -> None:
    lines = _text(report.summary_table([("a chat", _FINISH), ("another", _FINISH)])).splitlines()
    assert len(lines) == 3
    assert lines[0].split()[-2:] == ["handoff", "hidden"]  # not "moved", which requests are when a node has failed
    assert lines[1].split() == ["a", "chat", "400", "256", "21", "655", "ms", "75.0", "ms", "46.0", "MiB", "75", "%"]


def test_one_token_has_no_time_per_token() -> None:
    usage = dataclasses.replace(_FINISH.usage, completion_tokens=1)
    assert report.time_per_token_ms(usage, _TIMINGS) is None


@pytest.mark.parametrize(("exposed_ms", "percent"), [(0.0, 100.0), (400.0, 0.0), (500.0, 0.0), (300.0, 25.0)])
def test_the_hidden_share_stays_between_nothing_and_all(exposed_ms: float, percent: float) -> None:
    assert report.hidden_percent(dataclasses.replace(_TIMINGS, transfer_exposed_ms=exposed_ms)) == percent


def test_without_a_transfer_there_is_no_hidden_share() -> None:
    assert report.hidden_percent(dataclasses.replace(_TIMINGS, transfer_ms=0.0)) is None


@pytest.mark.parametrize(
    ("finish", "text"),
    [
        (dataclasses.replace(_FINISH, reason=FinishReason.LENGTH, matched_token_id=None), "ended at the length limit"),
        (dataclasses.replace(_FINISH, matched_token_id=None, matched_stop="\n\n"), r"stopped before '\n\n'"),
        (_FINISH, "stopped by token 2"),
        (dataclasses.replace(_FINISH, matched_token_id=None), "stopped"),
    ],
)
def test_the_end_of_an_answer_is_named(finish: Finish, text: str) -> None:
    assert report.describe_finish(finish) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**31, "2.0 GiB")]
)
def test_sizes_have_binary_units(num_bytes: int, text: str) -> None:
    assert report.format_bytes(num_bytes) == text


def test_nothing_cached_is_said_so() -> None:
    assert report.describe_cached(CachedTokens()) == "none"
