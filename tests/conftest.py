"""What holds for every test.

A property is judged by what is found, not by how long a busy machine takes for an example.

Shared out over several processes, files stay whole, so that what their tests share is made once; so do folders whose
files share processes. They are begun in the order of their names, in which those that take longest come first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

# Their session fixtures are meshes of node processes.
WHOLE_FOLDERS = ("tests/integration/mesh/",)

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class WholeFolderScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in WHOLE_FOLDERS if nodeid.startswith(folder)), super()._split_scope(nodeid))

    return WholeFolderScheduling(config, log)
