"""Adapters of a node: from its configuration to what it tells of itself, and what it knows under which digest."""

from __future__ import annotations

from pathlib import Path

import pytest
from pdmesh.v1 import mesh_pb2
from support.tiny_adapters import write_adapter
from unit.model_runtime import tiny_llama
from unit.model_runtime.reference_models import save

from decode_node.config import FusedNodeConfig
from node_runtime.adapters import AdapterId, ServedAdapters
from node_runtime.engine.assembly import build_core
from node_runtime.engine.core import ComputeCore
from node_runtime.engine.node_info import describe_node
from node_runtime.errors import AdapterNotHere, BadConfig, InvalidRequest, UnknownModel
from scheduler_core import Role

RED = AdapterId(name="red", digest=b"r" * 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and two adapters for it."""
    folder, reference = tmp_path_factory.mktemp("node"), tiny_llama.make_reference()
    save(reference, folder / "tiny")
    write_adapter(folder / "red", reference, ["q_proj", "down_proj"])
    write_adapter(folder / "blue", reference, ["v_proj"], seed=2)
    return folder


def core_with(folder: Path, *adapters: str) -> ComputeCore:
    config = FusedNodeConfig(
        model=str(folder / "tiny"), memory="2MiB", num_threads=1, prefix_granularity=16, adapter=adapters
    )
    return build_core(config, Role.FUSED)


def test_a_node_tells_of_the_adapters_that_its_configuration_names(folder: Path) -> None:
    core = core_with(folder, f"mine={folder / 'red'}", f"yours={folder / 'blue'}", f"also-mine={folder / 'red'}")
    info = describe_node(core, node_id="n", incarnation=1, role=mesh_pb2.NODE_ROLE_FUSED)
    digests = {adapter.name: adapter.digest for adapter in info.adapters}
    assert digests.keys() == {"mine", "yours", "also-mine"}
    assert digests["mine"] == digests["also-mine"] != digests["yours"]
    assert any(f'"mine" (sha256 {digests["mine"].hex()[:12]})' in line for line in core.describe())
    assert not describe_node(core_with(folder), node_id="n", incarnation=1, role=mesh_pb2.NODE_ROLE_FUSED).adapters


def test_an_adapter_that_cannot_be_had_keeps_the_node_from_starting(folder: Path) -> None:
    with pytest.raises(BadConfig, match=r'adapter "mine": .*adapter_config\.json: is missing'):
        core_with(folder, f"mine={folder / 'nowhere'}")
    with pytest.raises(BadConfig, match='adapter: "tiny" is the name of the model'):
        core_with(folder, f"tiny={folder / 'red'}")


def test_a_name_is_resolved_to_the_digest_that_is_served() -> None:
    served = ServedAdapters("node-1", [RED])
    assert served.resolve(None) is None
    for wanted in (AdapterId(name="red"), RED):
        assert served.resolve(wanted) == RED
    with pytest.raises(UnknownModel, match='adapter: "blue" is not served here, only "red"'):
        served.resolve(AdapterId(name="blue"))
    with pytest.raises(UnknownModel, match='adapter: "blue" is not served here, no adapter is'):
        ServedAdapters("node-1", []).resolve(AdapterId(name="blue"))
    for name, has in (("red", r'"red" \(sha256 727272727272\)'), ("blue", "no adapter of that name")):
        with pytest.raises(AdapterNotHere, match=rf'"{name}" \(sha256 000000000000\) is wanted, node node-1 has {has}'):
            served.resolve(AdapterId(name=name, digest=bytes(32)))


@pytest.mark.parametrize(
    ("name", "digest", "message"),
    [
        ("", b"", "adapter.name: 0 bytes given, 1 to 128"),
        ("é" * 65, b"", "adapter.name: 130 bytes given"),
        ("a\0", b"", "adapter.name: must be printable"),
        ("a", b"d", "adapter.digest: 1 bytes given, 32 or none"),
    ],
)
def test_names_and_digests_have_limits(name: str, digest: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        AdapterId(name=name, digest=digest)
