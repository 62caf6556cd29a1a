"""Values that the handoff tests share."""

from __future__ import annotations

from model_runtime.sampler import SampledToken, SamplingParams
from node_runtime.handoff.messages import Abort, Beat, Done, Failed, Grant, GroupGrant, Quiesced, Ready, Renewed, Start

ID = b"h" * 16
OTHER_ID = b"x" * 16


def start(**changes: object) -> Start:
    fields = {
        "handoff_id": ID,
        "request_id": "r",
        "token_ids": (1, 2, 3, 4, 5),
        "sampling": SamplingParams(),
        "decode_incarnation": 7,
        "prefill_incarnation": 8,
    }
    return Start(**{**fields, **changes})


GROUPS = (GroupGrant(group_id="full", first_slot=0, block_ids=(3, 4)),)


def grant(handoff_id: bytes = ID, **changes: object) -> Grant:
    return Grant(**{"handoff_id": handoff_id, "from_token": 0, "groups": GROUPS, **changes})


def ready(handoff_id: bytes = ID, beat_interval_ms: int = 1000) -> Ready:
    return Ready(handoff_id=handoff_id, cached_tokens=4, beat_interval_ms=beat_interval_ms)


def beat(number: int, handoff_id: bytes = ID) -> Beat:
    return Beat(handoff_id=handoff_id, number=number)


def renewed(number: int, handoff_id: bytes = ID) -> Renewed:
    return Renewed(handoff_id=handoff_id, beat=number)


def done(handoff_id: bytes = ID) -> Done:
    return Done(
        handoff_id=handoff_id,
        first_token=SampledToken(token_id=42),
        transferred_bytes=10,
        transferred_blocks=2,
        transferred_runs=1,
    )


def failed(handoff_id: bytes = ID) -> Failed:
    return Failed(handoff_id=handoff_id, code=14, message="the data plane is broken")


def quiesced(handoff_id: bytes = ID) -> Quiesced:
    return Quiesced(handoff_id=handoff_id)


def abort(handoff_id: bytes = ID) -> Abort:
    return Abort(handoff_id=handoff_id, reason="cancelled")
