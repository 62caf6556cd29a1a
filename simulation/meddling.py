"""Faults of single frames: which of them is due for which frame."""

from __future__ import annotations

from dataclasses import dataclass, field

from node_runtime.rpc.loopback_wire import Data, Frame
from simulation.faults import MeddleWith
from simulation.network import HANDOFF_MEDDLINGS, HANDOFF_METHOD, Meddled


@dataclass(slots=True)
class _Due:
    """A fault of frames that waits for its frame."""

    fault: MeddleWith
    num_skipped: int = 0
    num_hit: int = 0

    def hits(self, is_handoff: bool) -> bool:
        if self.fault.kind in HANDOFF_MEDDLINGS and not is_handoff:
            return False
        if self.num_skipped < self.fault.nth:
            self.num_skipped += 1
            return False
        self.num_hit += 1
        return True


@dataclass(slots=True)
class MeddlingPlan:
    """The `Meddler` of a network: faults of frames that are due."""

    due: list[_Due] = field(default_factory=list)

    def add(self, fault: MeddleWith) -> None:
        self.due.append(_Due(fault))

    def __call__(self, source: str, target: str, method: str, frame: Frame) -> Meddled | None:
        if not self.due:
            return None
        is_handoff = method == HANDOFF_METHOD and isinstance(frame, Data)
        for item in self.due:
            if (item.fault.source, item.fault.target) == (source, target) and item.hits(is_handoff):
                if item.num_hit == item.fault.num_frames:
                    self.due.remove(item)
                return Meddled(item.fault.kind, item.fault.seconds)
        return None
