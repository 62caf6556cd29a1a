"""How an engine under measurement talks to the benchmark: one process each, JSON lines on standard input and output.

The first line out says what was loaded, or what is not installed; then every line in is one question and every line
out its answer. Whatever an engine prints on its own goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable


class Engine(Protocol):
    """One engine with one model loaded. `facts` are numbers about the model, for whoever computes floors."""

    @property
    def facts(self) -> Mapping[str, float]: ...

    def prefill(self, num_tokens: int) -> float:
        """Seconds from a prompt of that many tokens to the first token after it."""

    def decode(self, batch_size: int, context_tokens: int, num_steps: int) -> float:
        """Seconds per step while `batch_size` requests, each with `context_tokens` behind it, generate together."""


@runtime_checkable
class Scorer(Protocol):
    """An engine that can be asked how likely a text is to it."""

    def score(self, tokens: list[int]) -> float:
        """Mean negative log-likelihood of every token but the first, given those before it; natural logarithm."""


def resident_bytes() -> int:
    """What this process has in memory now. Source: proc(5), statm, in pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompt(number: int, num_tokens: int) -> list[int]:
    """Ordinary tokens; no two prompts share a beginning."""
    return [100 + (7919 * position + 104_729 * number) % 20_000 for position in range(num_tokens)]


def serve(make: Callable[[Path, int, list[str]], Engine]) -> None:
    """Runs the engine `make(model, num_threads, other arguments)` of this process until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model, num_threads, *others = sys.argv[1:]
    try:
        engine = make(Path(model), int(num_threads), others)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": error.name}), file=replies)
        return
    print(json.dumps(dict(engine.facts)), file=replies)
    for line in sys.stdin:
        match json.loads(line):
            case {"prefill": int(num_tokens)}:
                value: float | None = engine.prefill(num_tokens)
            case {"decode": int(batch_size), "context": int(context_tokens), "steps": int(num_steps)}:
                value = engine.decode(batch_size, context_tokens, num_steps)
            case {"text": [*tokens]}:
                value = engine.score(tokens) if isinstance(engine, Scorer) else None
            case "resident":
                value = resident_bytes()
        print(json.dumps({"value": value}), file=replies)
