"""Whether nodes that leave in good order finish the streams that they have begun."""

from __future__ import annotations

from collections.abc import Mapping

from node_runtime.rpc.loopback_wire import Data, EndCall, Frame
from simulation.findings import Journal
from simulation.hosts import Host

GENERATES = frozenset(("/pdmesh.v1.Decode/Generate", "/pdmesh.v1.Inference/Generate"))
"""The methods whose streams carry tokens."""
# Every role's default; the configurations of simulated nodes leave it alone.
GRACE_S = 30.0


class StreamWatch:
    """Sees the frames of a network that belong to `GENERATES`."""

    def __init__(self, hosts: Mapping[str, Host], journal: Journal) -> None:
        self._hosts = hosts
        self._journal = journal
        # Calls on which something has come, by their client, its incarnation, their server, and their number there.
        self._begun: set[tuple[str, int, str, int]] = set()

    def on_frame(self, source: str, target: str, frame: Frame) -> None:
        """A frame goes from `source` to `target`."""
        if not isinstance(frame, Data | EndCall):
            return
        client, server = self._hosts.get(target), self._hosts[source]
        key = (target, 0 if client is None else client.num_boots, source, frame.call_id)
        if isinstance(frame, Data):
            self._begun.add(key)
        elif key in self._begun:
            self._begun.remove(key)
            self._judge_end(server, frame)

    def _judge_end(self, server: Host, end: EndCall) -> None:
        since_s = server.leaves_since_s
        if since_s is None or end.code.name != "UNAVAILABLE":
            return
        is_own = any(key == "pdmesh-draining" and value == server.name for key, value in end.metadata)
        took_s = server.around.world.now_s - since_s
        if is_own and took_s < GRACE_S:
            text = f"{server.name} cuts a stream off that it had begun, {took_s:.3f} s after it was told to leave"
            self._journal.find("cut off", text)
