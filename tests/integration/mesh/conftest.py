"""Meshes of real processes around the real model, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mesh import Mesh, start_disaggregated, start_fused
from support.span_sink import SpanSink, listening_sink

from pdmesh_cli.model_fetch import resolve_model

COLLECTION_MARKS = (pytest.mark.mesh, pytest.mark.real_model, pytest.mark.timeout(300))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for mark in COLLECTION_MARKS:
                item.add_marker(mark)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """SmolLM2-135M-Instruct, fetched on first use."""
    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def sink() -> Iterator[SpanSink]:
    """What the processes of `mesh` tell of their requests."""
    with listening_sink() as sink:
        yield sink


@pytest.fixture(scope="session")
def mesh(model_path: Path, tmp_path_factory: pytest.TempPathFactory, sink: SpanSink) -> Iterator[Mesh]:
    """Router, prefill and decode: three processes."""
    mesh = start_disaggregated(model_path, tmp_path_factory.mktemp("mesh"), extra=("--otlp-endpoint", sink.address))
    yield mesh
    mesh.stop()


@pytest.fixture(scope="session")
def fused_mesh(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Router and one fused node: the oracle of the disaggregated mesh."""
    mesh = start_fused(model_path, tmp_path_factory.mktemp("fused"))
    yield mesh
    mesh.stop()
