"""One mesh of real processes for all tests of this folder; each test gives it back whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.chaos.field import Field

COLLECTION_MARKS = (pytest.mark.mesh, pytest.mark.timeout(300))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for mark in COLLECTION_MARKS:
                item.add_marker(mark)


@pytest.fixture(scope="session")
def whole_field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """Two prefill nodes, two decode nodes, a router, and what each prompt is answered with in peace."""
    with Field(tmp_path_factory.mktemp("field")) as field:
        yield field


@pytest.fixture
def field(whole_field: Field) -> Iterator[Field]:
    """The mesh, checked afterwards: it serves, holds nothing, and no log shows a traceback."""
    yield whole_field
    whole_field.assert_whole()
