"""What holds for every test.

A property is judged by what is found, not by how long a busy machine takes for an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from support.costs import FileCosts
from support.sharing import make_scheduler, rank_of

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=int, default=0, metavar="N", help="list the N files that cost most processor time")


def pytest_configure(config: pytest.Config) -> None:
    if num_listed := config.getoption("--costs"):
        config.pluginmanager.register(FileCosts(num_listed))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return make_scheduler(config, log) if config.getvalue("dist") == "loadfile" else None
