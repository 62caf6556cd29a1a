"""How long the properties of this folder look for trouble: seconds on every commit, `make fuzz` as long as it is told.

On every commit the examples are the same ones, so that a failure is the commit's.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

FACTOR = int(os.environ.get("PDMESH_FUZZ_FACTOR", "0"))


def looks(num_examples: int, *, shrinks: bool = True) -> settings:
    """`num_examples` on every commit, that many times PDMESH_FUZZ_FACTOR where it is set, other ones each time.

    Without `shrinks` a failing example is shown as it was found: where each takes a while, making it small takes longer
    than a test may.
    """
    phases = [Phase.generate, Phase.shrink] if shrinks or FACTOR else [Phase.generate]
    return settings(
        max_examples=num_examples * max(1, FACTOR),
        derandomize=not FACTOR,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
