"""Words and tables for what one request cost. Pure functions of the client's typed results."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdmesh_cli.client_types import CachedTokens, Finish, FinishReason, Placement, Timings, Usage


def format_bytes(num_bytes: int) -> str:
    """Binary units with one decimal, e.g. 1536 -> "1.5 KiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def counted(count: int, noun: str) -> str:
    """The number with its noun, e.g. "1 token", "2 tokens"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def num_cached_tokens(cached: CachedTokens) -> int:
    return cached.prefill_device + cached.decode_device + cached.host + cached.storage


def describe_cached(cached: CachedTokens) -> str:
    """Cached tokens by source; sources that gave nothing are left out."""
    sources = (
        ("on the prefill node", cached.prefill_device),
        ("on the decode node", cached.decode_device),
        ("in host memory", cached.host),
        ("in the store", cached.storage),
    )
    parts = [f"{num_tokens:,} {source}" for source, num_tokens in sources if num_tokens]
    return ", ".join(parts) if parts else "none"


def time_per_token_ms(usage: Usage, timings: Timings) -> float | None:
    """Mean time between tokens; None when there was no second one."""
    return timings.decode_ms / (usage.completion_tokens - 1) if usage.completion_tokens > 1 else None


def hidden_percent(timings: Timings) -> float | None:
    """Share of the transfer's busy time that passed while the prompt was still computed; None without a transfer."""
    if timings.transfer_ms <= 0:
        return None
    return 100.0 * min(1.0, max(0.0, 1.0 - timings.transfer_exposed_ms / timings.transfer_ms))


def describe_place(placement: Placement) -> str:
    if placement.prefill_node:
        return f"prefill on {placement.prefill_node}, decode on {placement.decode_node}"
    return f"prefill and decode on {placement.decode_node}"


def describe_finish(finish: Finish) -> str:
    if finish.reason is FinishReason.LENGTH:
        return "ended at the length limit"
    if finish.matched_stop is not None:
        return f"stopped before {finish.matched_stop!r}"
    if finish.matched_token_id is not None:
        return f"stopped by token {finish.matched_token_id}"
    return "stopped"


def describe_speed(finish: Finish) -> str:
    timings = finish.timings
    per_token_ms = time_per_token_ms(finish.usage, timings)
    pace = "" if per_token_ms is None else f", then {per_token_ms:.1f} ms per token"
    return (
        f"first token after {timings.time_to_first_token_ms:,.0f} ms (queue {timings.prefill_queue_ms:,.0f}, "
        f"compute {timings.prefill_compute_ms:,.0f}){pace}"
    )


def describe_handoff(timings: Timings) -> str:
    """What was moved, and how long writes were outstanding for it."""
    if not timings.transferred_runs:
        return "nothing was moved"
    hidden = hidden_percent(timings)
    moved = (
        f"{format_bytes(timings.transferred_bytes)}, {counted(timings.transferred_runs, 'run')}, "
        f"{counted(timings.transferred_blocks, 'block')}"
    )
    if hidden is None:
        return moved
    return (
        f"{moved}; busy {timings.transfer_ms:,.0f} ms, "
        f"{timings.transfer_exposed_ms:,.1f} ms of it after the compute ({hidden:.0f} % hidden)"
    )


def print_report(placement: Placement, finish: Finish, console: Console) -> None:
    """A few labelled lines about one finished request. At a terminal a long one goes on below its beginning."""
    rows = report_rows(placement, finish)
    if console.is_terminal:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        for label, text in rows:
            table.add_row(label, Text(text))
        console.print(table)
    else:
        for label, text in rows:
            console.print(Text(f"{label:<9}{text}"), soft_wrap=True)


def report_rows(placement: Placement, finish: Finish) -> list[tuple[str, str]]:
    """Labels of at most seven characters, and what there is to say."""
    usage = finish.usage
    tokens = f"{usage.prompt_tokens:,} prompt, {usage.completion_tokens:,} completion ({describe_finish(finish)})"
    rows = [
        ("began" if finish.num_replacements else "ran", describe_place(placement)),
        *_moves(finish),
        ("tokens", tokens),
        ("cached", describe_cached(usage.cached)),
        ("speed", describe_speed(finish)),
    ]
    if placement.prefill_node:
        rows.append(("handoff", describe_handoff(finish.timings)))
    return rows


def _moves(finish: Finish) -> list[tuple[str, str]]:
    """That the request did not stay where it was placed first, if so."""
    if not finish.num_replacements:
        return []
    return [("moved", f"{counted(finish.num_replacements, 'time')}, because a node had failed or refused it")]


def summary_table(rows: Sequence[tuple[str, Finish]]) -> Table:
    """One line per request, numbers right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("request")
    for heading in ("prompt", "cached", "completion", "first token", "per token", "handoff", "hidden"):
        table.add_column(heading, justify="right", no_wrap=True)
    for title, finish in rows:
        usage, timings = finish.usage, finish.timings
        per_token_ms, hidden = time_per_token_ms(usage, timings), hidden_percent(timings)
        table.add_row(
            title,
            f"{usage.prompt_tokens:,}",
            f"{num_cached_tokens(usage.cached):,}",
            f"{usage.completion_tokens:,}",
            f"{timings.time_to_first_token_ms:,.0f} ms",
            "-" if per_token_ms is None else f"{per_token_ms:.1f} ms",
            format_bytes(timings.transferred_bytes),
            "-" if hidden is None else f"{hidden:.0f} %",
        )
    return table
