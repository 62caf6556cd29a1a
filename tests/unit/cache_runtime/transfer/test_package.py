"""What importing the package costs, and how an engine is chosen."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cache_runtime.transfer import create_engine
from cache_runtime.transfer.engine import DataPlaneUnavailable, Region
from cache_runtime.transfer.memory_engine import MemoryFabric


def test_importing_the_package_loads_neither_torch_nor_mooncake() -> None:
    modules = (
        "engine, memory_engine, mooncake_engine, placement, planner, poller, preflight, regions, schema, shm_engine, "
        "stream_engine"
    )
    script = (
        f"import cache_runtime.transfer\nfrom cache_runtime.transfer import {modules}\nimport sys\n"
        "print([name for name in ('torch', 'mooncake', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_memory_engines_of_one_fabric_reach_one_another() -> None:
    fabric = MemoryFabric()
    first, second = create_engine("memory", fabric=fabric), create_engine("memory", fabric=fabric)
    second.register(4096, 4096)
    link = first.open_peer(second.endpoint, [Region(base_address=4096, num_bytes=4096)])
    assert link.peer == second.endpoint


def test_an_unknown_data_plane_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(DataPlaneUnavailable, match='"carrier-pigeon" is unknown; choose one of shm, stream, mooncake'):
        create_engine("carrier-pigeon")
