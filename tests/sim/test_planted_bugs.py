"""The simulator finds bugs: each of those in `planted.py` within 1,000 seeds, by what it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sim.planted import PLANTED

from simulation.campaign import run_seed

MAX_SEEDS = 1000


def seeds_from(hint: int) -> Iterator[int]:
    """The seed that found the bug when it was last looked for, then all others."""
    yield hint
    yield from (seed for seed in range(MAX_SEEDS) if seed != hint)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    trace = PLANTED[plant]
    # By its kind: a patch that fits the code no more breaks something, too.
    is_found = any(trace.kind in run_seed(seed).kinds() for seed in seeds_from(trace.hint))
    assert is_found, f"not within {MAX_SEEDS} seeds"


def test_the_hints_find_nothing_by_themselves() -> None:
    for hint in sorted({trace.hint for trace in PLANTED.values()}):
        assert not run_seed(hint).findings
