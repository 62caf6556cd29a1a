"""A fused engine of two ranks that never rests: `python -m integration.ranks.leading_process MODEL`.

Prints the process id of its follower once both have computed something.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from integration.ranks.engines import Engine, config_of

from node_runtime.engine.core import load_core
from node_runtime.engine.ranks.processes import FollowerProcesses
from pdmesh_cli.parent_death import die_with_parent
from scheduler_core import Role


def main() -> None:
    die_with_parent()
    core = load_core(config_of(Path(sys.argv[1]), 2), Role.FUSED)
    assert isinstance(core.ranks, FollowerProcesses)
    engine = Engine(core)
    for number in itertools.count():
        engine.submit(str(number), [1, 2, 3], 100)
        engine.loop.run_until_idle()
        if number == 0:
            print(core.ranks.process_ids[0], flush=True)


if __name__ == "__main__":
    main()
