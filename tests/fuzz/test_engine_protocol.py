"""The engine protocol of gateways is an entry point too: every RPC of it, hit as our own are."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.message import Message

pytest.importorskip("smg_grpc_proto", reason="the extra smg is not installed")

from fuzz.attack import Case, attack
from fuzz.fuzzed_mesh import FuzzedMesh, all_methods, documented_statuses
from fuzz.good_messages import SCHEMA, TOKENS
from smg_grpc_proto.generated import common_pb2, tokenspeed_scheduler_pb2
from support.tiny_checkpoint import END_TOKEN

(SERVICE,) = tokenspeed_scheduler_pb2.DESCRIPTOR.services_by_name.values()
(GENERATE,) = [method for method in all_methods() if method.full_name == "pdmesh.v1.Decode.Generate"]
# What the service below it answers, and that something is not there at all.
ALLOWED = documented_statuses(GENERATE) | {grpc.StatusCode.UNIMPLEMENTED}


def generate_requests() -> tuple[Message, ...]:
    request, sampling = tokenspeed_scheduler_pb2.GenerateRequest, tokenspeed_scheduler_pb2.SamplingParams
    tokenized = tokenspeed_scheduler_pb2.TokenizedInput(original_text="t", input_ids=TOKENS)
    plain = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "n": 1, "max_new_tokens": 3}
    common = {"tokenized": tokenized, "logprob_start_len": -1}
    return (
        request(request_id="a", sampling_params=sampling(**plain, stop=["zz"]), stream=True, **common),
        request(request_id="b", sampling_params=sampling(**plain | {"n": 2}, stop_token_ids=[END_TOKEN]), **common),
        request(
            request_id="c",
            sampling_params=sampling(**plain, json_schema=SCHEMA, logit_bias={"5": 1.0}),
            return_logprob=True,
            top_logprobs_num=2,
            **common,
        ),
    )


GOOD: dict[str, tuple[Message, ...]] = {
    "Generate": generate_requests(),
    "Abort": (tokenspeed_scheduler_pb2.AbortRequest(request_id="a", reason="tired"),),
    "GetLoads": (tokenspeed_scheduler_pb2.GetLoadsRequest(include=["core"]),),
    "FlushCache": (common_pb2.FlushCacheRequest(timeout_s=0.1),),
    "SubscribeKvEvents": (common_pb2.SubscribeKvEventsRequest(start_sequence_number=1),),
}
ENDLESS = {"SubscribeKvEvents"}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedMesh]:
    with FuzzedMesh(tmp_path_factory.mktemp("fuzzed"), engine_protocol="smg") as mesh:
        yield mesh


@pytest.mark.parametrize("name", SERVICE.methods_by_name)
def test_whatever_a_gateway_sends_is_answered_by_the_rules_and_harms_nobody(mesh: FuzzedMesh, name: str) -> None:
    case = Case(
        nodes=("fused",),
        good=lambda mesh: GOOD.get(name, ()),
        timeout_s=0.2 if name in ENDLESS else 1.0,
        num_bursts=20 if name == "Generate" else 4,
    )
    seen = attack(mesh, SERVICE.methods_by_name[name], case, "fused", ALLOWED)
    assert grpc.StatusCode.INVALID_ARGUMENT in seen
    assert grpc.StatusCode.OK in seen or name in ENDLESS
