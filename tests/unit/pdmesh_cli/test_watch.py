"""The live view of the nodes."""

from __future__ import annotations

import pytest
from pdmesh.v1 import mesh_pb2
from rich.console import Console

from pdmesh_cli.status import NodeReport
from pdmesh_cli.watch import Look, WatchView, arena_bar


def report(num_steps: int, *, incarnation: int = 1) -> NodeReport:
    return NodeReport(
        address="10.0.0.1:7701",
        info=mesh_pb2.NodeInfo(node_id="decode-1", role=mesh_pb2.NODE_ROLE_DECODE, incarnation=incarnation),
        status=mesh_pb2.NodeStatus(
            serving=True,
            num_waiting_requests=12,
            num_running_requests=3,
            num_handoffs=7,
            num_steps=num_steps,
            arena=mesh_pb2.ArenaStatus(total_lcm_blocks=100, empty_lcm_blocks=60, active_lcm_blocks=40),
            peers=[mesh_pb2.PeerStatus(node_id="prefill-1", state="ready"), mesh_pb2.PeerStatus(state="suspect")],
        ),
    )


def shown(look: Look, before: Look | None = None, *, width: int = 200) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(WatchView(look=look, before=before))
    return capture.get()


def test_rates_are_those_since_the_last_look() -> None:
    before = Look((report(10),), 100.0)
    text = shown(Look((report(40),), 102.0), before)
    header, row, *_ = (line.split() for line in text.splitlines())
    assert header[:7] == ["node", "role", "state", "waiting", "running", "handoffs", "steps/s"]
    assert row[:7] == ["decode-1", "decode", "serving", "12", "3", "7", "15.0"]
    assert "40/100" in text
    assert "1 of 2 ready" in text
    assert "suspect" in text


def test_a_node_that_was_started_anew_has_no_rate_yet() -> None:
    text = shown(Look((report(40, incarnation=2),), 102.0), Look((report(10),), 100.0))
    assert "15.0" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off_at_the_width_of_a_terminal(width: int) -> None:
    other = NodeReport(
        address="10.0.0.2:7701", error="UNAVAILABLE: cannot connect to 10.0.0.2:7701: Connection refused"
    )
    before, after = Look((report(10), other), 100.0), Look((report(4000), other), 102.0)
    text = shown(after, before, width=width)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    for word in ("decode-1", "serving", "1,995.0", "40/100", "suspect", "no answer", "Connection refused"):
        assert word in text


def test_a_node_that_refuses_to_tell_is_not_said_to_be_silent() -> None:
    refusing = NodeReport(address="10.0.0.2:7701", error="PERMISSION_DENIED: for operators", is_refusal=True)
    text = shown(Look((refusing,), 1.0))
    assert "refused" in text
    assert "no answer" not in text


def test_a_node_that_does_not_answer_is_shown_with_the_reason() -> None:
    text = shown(Look((NodeReport(address="10.0.0.2:7701", error="UNAVAILABLE: gone"),), 1.0))
    assert "10.0.0.2:7701" in text
    assert "UNAVAILABLE: gone" in text


def test_the_bar_has_a_cell_for_whatever_holds_a_block_and_always_the_same_width() -> None:
    for active, cached, quarantined in ((0, 0, 0), (1, 1, 1), (9_997, 1, 1), (5_000, 5_000, 0), (3_333, 3_333, 3_333)):
        arena = mesh_pb2.ArenaStatus(
            total_lcm_blocks=10_000,
            active_lcm_blocks=active,
            cached_lcm_blocks=cached,
            quarantined_lcm_blocks=quarantined,
            empty_lcm_blocks=10_000 - active - cached - quarantined,
        )
        bar = arena_bar(arena)
        assert bar.plain.count("█") == 24
        drawn = {str(span.style) for span in bar.spans if span.end > span.start}
        for style, count in (("green", active), ("blue", cached), ("red", quarantined)):
            assert (style in drawn) == bool(count)
    assert arena_bar(mesh_pb2.ArenaStatus()).plain == "-"


def test_cache_groups_and_speeds_are_told_below_where_there_is_room() -> None:
    groups = [
        mesh_pb2.GroupStatus(group_id="full", lcm_blocks=30, cached_lcm_blocks=10, taken_blocks=55),
        mesh_pb2.GroupStatus(group_id="sliding", lcm_blocks=10, cached_lcm_blocks=10, taken_blocks=4),
    ]
    look = Look((report(10),), 100.0)
    status = look.reports[0].status
    assert status is not None
    status.arena.groups.extend(groups)
    status.prefill_tokens_per_s, status.decode_step_ms = 1234.5, 12.25
    lines = shown(look, width=80).splitlines()
    (heading,) = (number for number, line in enumerate(lines) if "of the arena" in line)
    full, sliding = (line.split() for line in lines[heading + 1 : heading + 3])
    assert (full[:2], full[3:6]) == (["decode-1", "full"], ["20", "10", "55"])
    assert " ".join(full[6:]) == "1,234 tok/s, 12.2 ms/step"
    assert (sliding[0], sliding[2:]) == ("sliding", ["0", "10", "4"])
    assert max(len(line) for line in lines) <= 80
    low = Console(width=80, height=8, color_system=None)
    with low.capture() as capture:
        low.print(WatchView(look=look), height=8)
    assert "of the arena" not in capture.get()
