"""How a run is shared out over several processes.

Files stay whole, so that what their tests share is made once; so do folders whose files share processes. What takes
longest is begun first, so that no process works on alone at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

# Their session fixtures are meshes of node processes.
WHOLE_FOLDERS = ("tests/integration/mesh/",)
# As `--costs` lists them; between the two that start many processes what computes in one.
LONGEST_FIRST = (
    "tests/integration/mesh/",
    "tests/unit/scheduler_core/test_against_reference_model.py",
    "tests/unit/model_runtime/",
    "tests/sim/",
    "tests/integration/chaos/",
)


def rank_of(nodeid: str) -> int:
    """Those with a smaller one are begun earlier."""
    ranks = (rank for rank, prefix in enumerate(LONGEST_FIRST) if nodeid.startswith(prefix))
    return next(ranks, len(LONGEST_FIRST))


def make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """For `--dist loadfile`."""
    from xdist.scheduler import LoadFileScheduling

    class WholeFolderScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in WHOLE_FOLDERS if nodeid.startswith(folder)), super()._split_scope(nodeid))

    return WholeFolderScheduling(config, log)
