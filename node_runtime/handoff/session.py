"""The two sans-IO sessions of a handoff: events in, actions out, one object per attempt and side.

A session owns the state of one handoff and nothing else. It knows no socket, thread, scheduler or clock: the role
packages feed it events in the order in which they happen (from one thread), carry out the returned actions in order,
pass the time in, and bring a Tick when `wakeup_at_s` has come. An event that breaks the protocol raises
`InvalidRequest` and leaves the session as it was; one that is late, repeated or overtaken changes nothing.
"""

from __future__ import annotations

from node_runtime.handoff.decode_session import DecodeHandoff
from node_runtime.handoff.prefill_session import STALL_BOUND_S, PrefillHandoff

__all__ = ["STALL_BOUND_S", "DecodeHandoff", "PrefillHandoff"]
