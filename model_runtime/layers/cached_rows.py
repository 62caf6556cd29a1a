"""What every attention over cached rows does: leave this forward's rows in the cache, and attend over all of them.

The one place that knows that rows may lie on several context ranks: each attends over those it holds, and the results
are joined by the logarithms of their softmax sums, in the order of the ranks, so that all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model_runtime.forward_context import ForwardContext


def store_rows(buffer: torch.Tensor, rows: torch.Tensor, group_id: str, context: ForwardContext) -> None:
    """Writes rows[num_tokens, ...] of this forward to the group's `buffer`[num_rows, ...], as far as it is here."""
    locations = context.routed.write_locations(group_id)
    held_tokens = context.routed.held_tokens(group_id)
    if held_tokens is not None:
        locations, rows = locations[held_tokens], rows[held_tokens]
    context.kernels.store_rows(rows, locations, buffer)


def attend_rows(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    group_id: str,
    scale: float,
    window_left_tokens: int | None,
    context: ForwardContext,
) -> torch.Tensor:
    """`query` [num_tokens, num_heads, head_dim] -> the like, over this forward's rows and all before them.

    Pages [num_pages, kernel_page_size, num_kv_heads, head_dim] hold what this rank has of the group.
    """
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    is_sharded = context.routed.held_tokens(group_id) is not None
    log_sum_exp = query.new_empty(query.shape[:2]) if is_sharded else None  # [num_tokens, num_heads]
    context.kernels.attend(
        query,
        key_pages,
        value_pages,
        context.routed.page_table(group_id),
        context.batch.begins,
        context.batch.lengths,
        output,
        scale,
        window_left_tokens,
        log_sum_exp,
    )
    return output if log_sum_exp is None else _join_ranks(output, log_sum_exp, context)


def join_partial_attention(outputs: Sequence[torch.Tensor], log_sum_exps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention over all rows from that over disjoint parts of them, which together hold something for every query.

    `outputs`: float32[num_tokens, num_heads, head_dim] each, `log_sum_exps`: float32[num_tokens, num_heads] each, -inf
    where a part holds nothing for a query. In float64 and in the order given, so that the result does not depend on how
    torch shares out or vectorises it. Source: Dao et al. 2022, "FlashAttention", section 3.1.
    """
    largest = torch.stack(tuple(log_sum_exps)).amax(dim=0).double()
    joined = torch.zeros(outputs[0].shape, dtype=torch.float64)
    total = torch.zeros_like(largest)
    for output, log_sum_exp in zip(outputs, log_sum_exps, strict=True):
        weight = torch.exp(log_sum_exp - largest)
        joined += weight.unsqueeze(-1) * output
        total += weight
    return (joined / total.unsqueeze(-1)).to(outputs[0].dtype)


def _join_ranks(output: torch.Tensor, log_sum_exp: torch.Tensor, context: ForwardContext) -> torch.Tensor:
    packed = torch.cat((output, log_sum_exp.unsqueeze(-1)), dim=-1)  # one message per layer
    parts = context.ranks.all_gather(packed)
    return join_partial_attention([part[..., :-1] for part in parts], [part[..., -1] for part in parts])
