"""Control messages of handoffs as lines of a transcript."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from pdmesh.v1 import handoff_pb2

from node_runtime.rpc.loopback_wire import Data


class MessageTeller:
    """Describes messages. Handoffs are called H1, H2, ... in the order of their appearance: their ids are random."""

    def __init__(self) -> None:
        self._aliases: dict[bytes, str] = {}

    def tell(self, frame: Data, *, is_request: bool) -> str:
        """`is_request`: from the decode node to the prefill node."""
        try:
            if is_request:
                text = self._request(handoff_pb2.HandoffRequest.FromString(frame.data))
            else:
                text = self._response(handoff_pb2.HandoffResponse.FromString(frame.data))
        except DecodeError:
            text = "nonsense"
        return text

    def _request(self, message: handoff_pb2.HandoffRequest) -> str:
        match message.WhichOneof("message"):
            case "start":
                start = message.start
                return f"start of {self._alias(start.handoff_id)} for {start.request_id}, {len(start.token_ids)} tokens"
            case "grant":
                grant = message.grant
                groups = ", ".join(f"{group.group_id} {list(group.block_ids)}" for group in grant.groups)
                return f"grant of {self._alias(grant.handoff_id)} from token {grant.from_token}: {groups}"
            case "abort":
                return f"abort of {self._alias(message.abort.handoff_id)}: {message.abort.reason}"
            case other:
                return str(other)

    def _response(self, message: handoff_pb2.HandoffResponse) -> str:
        match message.WhichOneof("message"):
            case "ready":
                return f"ready of {self._alias(message.ready.handoff_id)}, {message.ready.cached_tokens} cached"
            case "done":
                done = message.done
                return f"done of {self._alias(done.handoff_id)}, first token {done.first_token.token_id}"
            case "failed":
                return f"failed of {self._alias(message.failed.handoff_id)}: {message.failed.message}"
            case "quiesced":
                return f"quiesced of {self._alias(message.quiesced.handoff_id)}"
            case other:
                return str(other)

    def _alias(self, handoff_id: bytes) -> str:
        return self._aliases.setdefault(handoff_id, f"H{len(self._aliases) + 1}")
