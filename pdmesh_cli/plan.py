"""`pdmesh plan`: how the cache of a model would lie in a given memory, and what it would hold. Allocates nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cache_runtime.recipes.plan import CacheGroupLayout, CacheMemoryPlan
from cache_runtime.recipes.spec import CacheFamily, parse_layer_field_id
from node_runtime.config import ComputeNodeConfig, format_size
from node_runtime.engine.cache_plan import PlannedCache, plan_cache
from scheduler_core import Role

ROLES = {role.name.lower(): role for role in (Role.FUSED, Role.PREFILL, Role.DECODE)}
_REQUEST_TOKENS = (256, 1024, 4096, 16384, 65536)


def plan_report(config: ComputeNodeConfig, role: Role) -> RenderableType:
    """Groups, packing, padding and capacity. Raises BadConfig naming the culprit."""
    planned = plan_cache(config, role)
    return Group(_facts(planned, config), Text(), _groups(planned.setup.plan), Text(), _requests(planned))


def _table(**columns: bool) -> Table:
    """Named columns; True aligns one to the right. Underscores stand for spaces."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, is_number in columns.items():
        table.add_column(name.replace("_", " "), justify="right" if is_number else "left", no_wrap=True)
    return table


def _facts(planned: PlannedCache, config: ComputeNodeConfig) -> Table:
    model, setup = planned.model, planned.setup
    plan, layout = setup.plan, setup.plan.layout
    table = Table.grid(padding=(0, 2, 0, 0))
    context = f"context {model.max_position_tokens:,} tokens"
    arena = format_size(plan.num_arena_bytes)
    table.add_row("model", f"{model.architecture}, {setup.num_layers} layers, {context}")
    table.add_row("memory", f"{format_size(config.memory)}, of which the arena takes {arena}")
    table.add_row(
        "blocks",
        f"{plan.num_lcm_blocks:,} LCM blocks of {format_size(layout.lcm_block_bytes)} in "
        f"{len(layout.plane_bytes)} planes, prefix granularity {plan.prefix_granularity} tokens",
    )
    table.add_row("capacity", f"{setup.token_capacity:,} tokens at most")
    return table


def _groups(plan: CacheMemoryPlan) -> Table:
    table = _table(
        group=False,
        keeps=False,
        layers=True,
        tokens_per_block=True,
        block=True,
        per_LCM_block=True,
        padding=True,
        blocks=True,
    )
    for group in plan.layout.groups:
        table.add_row(*_group_cells(plan, group))
    return table


def _group_cells(plan: CacheMemoryPlan, group: CacheGroupLayout) -> Iterator[str]:
    layers = {parsed.layer for field in group.fields if (parsed := parse_layer_field_id(field.field_id))}
    yield group.group_id
    yield _retention(group)
    yield f"{len(layers):,}"
    yield f"{group.spec.block_granularity:,}"
    yield format_size(group.block_bytes)
    yield f"{group.cache_blocks_per_lcm_block:,}"
    yield f"{plan.layout.padding_bytes(group) / plan.layout.lcm_block_bytes:.1%}"
    yield f"{plan.num_blocks(group.group_id) - 1:,}"


def _retention(group: CacheGroupLayout) -> str:
    if group.spec.family is CacheFamily.STATE:
        return "snapshots"
    window_tokens = group.spec.sliding_window_tokens
    return "everything" if window_tokens is None else f"{window_tokens:,} tokens"


def _requests(planned: PlannedCache) -> Table:
    """How many requests fit at a time, by their length; the last column is the longest there can be."""
    context_tokens = planned.limits.context_tokens
    lengths = [tokens for tokens in _REQUEST_TOKENS if tokens < context_tokens] + [context_tokens]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("tokens per request", no_wrap=True)
    for tokens in lengths:
        table.add_column(f"{tokens:,}", justify="right", no_wrap=True)
    counts = [planned.concurrent_requests(tokens) for tokens in lengths]
    shown = (f"{count:,}+" if count == planned.limits.max_batch_size else f"{count:,}" for count in counts)
    table.add_row("requests at a time", *shown)
    return table
