"""Request traces: those in Mooncake's format, and one that is generated.

A trace names the 512-token blocks of each prompt by hash ids; equal ids mean equal prefixes. The token ids of a block
are a function of its hash id, so a hit is a true hit of the prefix index.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """`hash_ids` int32[blocks]: the last one names a block that is partly filled, as a rule."""

    arrival_s: float
    hash_ids: npt.NDArray[np.int32]
    prompt_tokens: int
    output_tokens: int

    def tokens(self) -> npt.NDArray[np.int32]:
        """int32[prompt_tokens]: block h holds the tokens h * 512 and up."""
        blocks = self.hash_ids[:, None] * np.int32(BLOCK_TOKENS) + np.arange(BLOCK_TOKENS, dtype=np.int32)
        return np.asarray(blocks.reshape(-1)[: self.prompt_tokens], dtype=np.int32)


def read_trace(path: Path, num_requests: int, *, max_prompt_tokens: int) -> list[TracedRequest]:
    """The first requests of a file, those with longer prompts left out."""
    with path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    requests = [
        TracedRequest(
            arrival_s=record["timestamp"] / 1000,
            hash_ids=np.array(record["hash_ids"], dtype=np.int32),
            prompt_tokens=record["input_length"],
            output_tokens=max(1, record["output_length"]),
        )
        for record in records
        if 0 < record["input_length"] <= max_prompt_tokens
    ]
    requests.sort(key=lambda request: request.arrival_s)
    return requests[:num_requests]


def generate_trace(num_requests: int, *, seed: int = 0) -> list[TracedRequest]:
    """Conversations behind shared system prompts: a turn repeats all before it. A few system prompts are popular."""
    rng = np.random.default_rng(seed)
    next_id = 0

    def fresh(num_blocks: int) -> list[int]:
        nonlocal next_id
        next_id += num_blocks
        return list(range(next_id - num_blocks, next_id))

    systems = [fresh(int(rng.integers(1, 9))) for _ in range(24)]
    popularity = 1.0 / np.arange(1, len(systems) + 1)
    popularity /= popularity.sum()
    sessions: list[list[int]] = []
    requests = []
    now_s = 0.0
    for _ in range(num_requests):
        now_s += float(rng.exponential(0.25))
        if sessions and rng.random() < 0.6:
            # People who were just answered go on soonest.
            recency = min(len(sessions) - 1, int(rng.exponential(40)))
            session = sessions.pop(len(sessions) - 1 - recency)
        else:
            session = list(systems[int(rng.choice(len(systems), p=popularity))])
        session = session + fresh(int(rng.integers(1, 13)))
        if len(session) < 120:
            sessions.append(session)
        requests.append(
            TracedRequest(
                arrival_s=now_s,
                hash_ids=np.array(session, dtype=np.int32),
                # The last block is partly filled, so that a turn is never found whole.
                prompt_tokens=len(session) * BLOCK_TOKENS - int(rng.integers(1, BLOCK_TOKENS)),
                output_tokens=int(rng.integers(16, 400)),
            )
        )
    return requests


def paced(requests: Sequence[TracedRequest], factor: float) -> list[TracedRequest]:
    """The same requests in `factor` of the time."""
    return [replace(request, arrival_s=request.arrival_s * factor) for request in requests]
