"""A mesh of in-process nodes for every test of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.fake_mesh import FakeMesh


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    mesh = FakeMesh()
    yield mesh
    await mesh.close()
