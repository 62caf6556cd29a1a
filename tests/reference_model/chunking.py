"""How much of a prompt one round computes. Pure arithmetic over the shape."""

from __future__ import annotations

from reference_model.values import SchedulerShape


def chunk_end(
    shape: SchedulerShape, num_prompt_tokens: int, begin: int, num_budget_tokens: int, promotion_tokens: int
) -> int:
    """Where a chunk from `begin` ends; at `begin` if this round has too little budget for one.

    A prompt is stopped where others share it. Snapshots are taken on grain boundaries, so beside a state group, and on
    the way to such a stop, a chunk that leaves its prompt incomplete ends on one. The last chunk computes the window of
    a replayable group whole, so no chunk ends inside that, and no stop lies in it. One that begins between two
    boundaries goes to the next of them and no further."""
    last_chunk_begins_before = num_prompt_tokens - shape.replay_window_tokens
    has_stop = begin < promotion_tokens <= last_chunk_begins_before
    end = min(num_prompt_tokens, begin + num_budget_tokens)
    if has_stop:
        end = min(end, promotion_tokens)
    if end == num_prompt_tokens:
        return end
    end = min(end, last_chunk_begins_before)
    grain = shape.prefix_granularity
    boundary = end // grain * grain
    if begin % grain and boundary > begin:
        boundary = begin // grain * grain + grain
    if shape.has_state or (has_stop and boundary > begin):
        end = boundary
    return max(begin, end)


def replay_tokens(shape: SchedulerShape, hit_tokens: int) -> int:
    """Before a hit the window is fed again, as far as there is any."""
    return min(shape.replay_window_tokens, hit_tokens)


def least_budget(shape: SchedulerShape) -> int:
    """With as much any prompt gets somewhere: a grain beside a state group; beside a replayable one a window that is
    fed again, and behind it a chunk that may be the last."""
    if shape.has_state:
        return shape.prefix_granularity
    window = shape.replay_window_tokens
    return window + max(window, shape.prefix_granularity) if window else 0
