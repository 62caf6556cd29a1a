"""What the engine protocol needs, who may call it, and which prefill node a decode node chooses for it."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import cast

import pytest
from pdmesh.v1 import decode_pb2

from decode_node.bootstrap import PrefillPeer
from decode_node.config import DecodeNodeConfig, FusedNodeConfig
from decode_node.engine_protocol.assembly import check_installed
from decode_node.engine_protocol.whole_engine import MAX_ATTEMPTS, WholeEngine, chosen_peer
from decode_node.peers import PrefillPeers
from decode_node.service import DecodeService
from node_runtime.errors import BadConfig, NodeError, PrefillFailed
from node_runtime.rpc import RpcContext, status_of
from node_runtime.rpc.access import ENGINE_PROTOCOL, roles_for


@dataclass
class Peer:
    node_id: str
    num_users: int = 0

    @property
    def address(self) -> str:
        return f"{self.node_id}:1"


@dataclass
class Peers:
    ready: list[Peer]


@dataclass
class FailingDecode:
    """Its prefill nodes all fail with `code_name`, before anything of the answer is there or behind its beginning."""

    code_name: str
    has_begun: bool = False
    asked: list[str] = field(default_factory=list)

    async def Generate(
        self, request: decode_pb2.DecodeRequest, context: object
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        self.asked.append(request.prefill_address)
        if self.has_begun:
            yield decode_pb2.DecodeResponse()
        raise PrefillFailed(self.code_name, "it broke", address=request.prefill_address)


async def failure_by(decode: FailingDecode) -> NodeError:
    engine = WholeEngine(
        cast(DecodeService, decode),
        node_id="decode-0",
        peers=cast(PrefillPeers, Peers([Peer(f"prefill-{index}") for index in range(4)])),
        prefills_locally=False,
        prefix_granularity=4,
    )
    with pytest.raises(NodeError) as caught:
        async for _ in engine.generate(decode_pb2.DecodeRequest(token_ids=range(8)), cast(RpcContext, None)):
            pass
    return caught.value


def choose(peers: list[Peer], beginning: bytes) -> str:
    return chosen_peer(cast("list[PrefillPeer]", peers), beginning).node_id


def test_prompts_that_begin_alike_go_to_one_node_and_others_to_all() -> None:
    peers = [Peer(f"prefill-{index}") for index in range(4)]
    beginnings = [bytes([number]) * 8 for number in range(200)]
    chosen = {beginning: choose(peers, beginning) for beginning in beginnings}
    assert {beginning: choose(peers[::-1], beginning) for beginning in beginnings} == chosen
    assert min(Counter(chosen.values()).values()) > 25
    # Only the prompts of a node that is gone go elsewhere.
    left = peers[1:]
    assert all(choose(left, beginning) == node for beginning, node in chosen.items() if node != "prefill-0")


def test_a_node_that_is_much_busier_than_others_is_left_alone() -> None:
    peers = [Peer(f"prefill-{index}") for index in range(3)]
    favourite = choose(peers, b"prompt")
    next(peer for peer in peers if peer.node_id == favourite).num_users = 2
    assert choose(peers, b"prompt") == favourite
    next(peer for peer in peers if peer.node_id == favourite).num_users = 3
    assert choose(peers, b"prompt") != favourite


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize(
    ("code_name", "told"),
    [
        ("CANCELLED", "UNAVAILABLE"),
        ("UNKNOWN", "UNAVAILABLE"),
        ("UNAVAILABLE", "UNAVAILABLE"),
        ("DATA_LOSS", "DATA_LOSS"),
        ("RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"),
    ],
)
async def test_who_has_cancelled_nothing_hears_of_no_cancellation(code_name: str, told: str, has_begun: bool) -> None:
    decode = FailingDecode(code_name, has_begun)
    error = await failure_by(decode)
    assert (status_of(error).name, error.message) == (told, "it broke")
    assert len(set(decode.asked)) == len(decode.asked) == (1 if has_begun else MAX_ATTEMPTS)


@pytest.mark.parametrize("config_class", [DecodeNodeConfig, FusedNodeConfig])
def test_without_the_package_a_node_that_is_to_serve_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, config_class: type[DecodeNodeConfig | FusedNodeConfig]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_installed(config_class(model="m"))
    with pytest.raises(BadConfig, match=r"engine_protocol: smg needs .* pip install 'pdmesh\[smg\]'"):
        check_installed(config_class(model="m", engine_protocol="smg"))


def test_it_is_for_gateways_alone_and_they_may_call_nothing_else() -> None:
    for method in ("Generate", "Abort", "FlushCache", "SubscribeKvEvents"):
        assert roles_for(f"/{ENGINE_PROTOCOL}/{method}") == {"gateway"}
    for method in ("Decode/Generate", "Prefill/Handoff", "Node/GetNodeStatus", "Node/Follow", "Node/ClearCache"):
        assert "gateway" not in roles_for(f"/pdmesh.v1.{method}")


def test_the_service_has_the_name_that_the_package_gives_it() -> None:
    messages = pytest.importorskip(
        "smg_grpc_proto.generated.tokenspeed_scheduler_pb2", reason="the extra smg is not installed"
    )
    (service,) = messages.DESCRIPTOR.services_by_name.values()
    assert service.full_name == ENGINE_PROTOCOL
