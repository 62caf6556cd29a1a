"""What a node answers when it is asked to compute on a device that it cannot use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pdmesh.v1 import mesh_pb2
from unit.model_runtime import tiny_llama

from node_runtime.config import ComputeNodeConfig, load_config
from node_runtime.engine.core import load_core
from node_runtime.engine.node_info import describe_node
from node_runtime.errors import BadConfig
from scheduler_core import Role


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama.save(tiny_llama.make_reference(), tmp_path / "model")


def config(model: Path, device: str) -> ComputeNodeConfig:
    values = {"model": str(model), "device": device, "memory": "1MiB", "prefix_granularity": 16, "num_threads": 1}
    return load_config(ComputeNodeConfig, values)


def test_a_fused_node_without_cuda_says_what_torch_lacks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BadConfig, match=r'device "cuda:0" is not there: torch .* is built without CUDA'):
        load_core(config(model, "cuda"), Role.FUSED)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_node_that_moves_its_cache_computes_on_the_cpu_only(model: Path, role: Role) -> None:
    with pytest.raises(BadConfig, match=f"device: cuda:1 computes on fused nodes only, a {role.name.lower()} node"):
        load_core(config(model, "cuda:1"), role)


def test_the_facts_of_a_node_name_its_device_and_what_its_kernels_promise(model: Path) -> None:
    facts = load_core(config(model, "cpu"), Role.FUSED).facts
    assert (facts.device, facts.is_batch_invariant) == ("cpu", True)


@pytest.mark.parametrize("is_batch_invariant", [True, False])
def test_what_the_kernels_promise_is_what_the_node_tells(model: Path, is_batch_invariant: bool) -> None:
    core = load_core(config(model, "cpu"), Role.FUSED)
    core = replace(core, facts=replace(core.facts, is_batch_invariant=is_batch_invariant))
    info = describe_node(core, node_id="fused-1", incarnation=1, role=mesh_pb2.NODE_ROLE_FUSED)
    assert info.batch_invariant is is_batch_invariant
    assert ("last bits may depend" in "\n".join(core.describe())) is not is_batch_invariant


def test_a_device_of_another_make_is_refused_by_the_configuration(model: Path) -> None:
    with pytest.raises(BadConfig, match=r"device: .*got 'tpu'"):
        config(model, "tpu")
