"""Bursts of hostile calls to one RPC, and what is asserted of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
from fuzz.effort import looks
from fuzz.fuzzed_mesh import FuzzedMesh, Outcome
from fuzz.messages import encoded, hostile, message_of, raw_bytes
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

MAX_BURST = 8
NO_MESSAGE = b"\xff\xff"


def nothing(mesh: FuzzedMesh) -> tuple[Message, ...]:
    return ()


async def at_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Who is asked, what good requests look like, and how long a call may last. `num_bursts` of each who is asked."""

    nodes: tuple[str, ...]
    good: Callable[[FuzzedMesh], tuple[Message, ...]] = nothing
    timeout_s: float = 1.0
    num_bursts: int = 3


def attack(
    mesh: FuzzedMesh,
    method: MethodDescriptor,
    case: Case,
    node: str,
    allowed: frozenset[grpc.StatusCode],
    look: Callable[[], Awaitable[None]] = at_nothing,
) -> set[grpc.StatusCode]:
    """Bursts of hostile messages, with a `look` at what they left after each; the statuses that came of them, all of
    which are `allowed`.
    """
    assert not allowed & {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
    good = case.good(mesh) or (message_of(method.input_type),)
    messages = hostile(method.input_type, good).map(encoded) | raw_bytes(good)
    seen: set[grpc.StatusCode] = set()

    @looks(case.num_bursts, shrinks=False)
    @given(st.lists(messages, min_size=1, max_size=MAX_BURST))
    def bursts(burst: list[bytes]) -> None:
        async def fire() -> list[Outcome]:
            calls = (mesh.call(node, method, data, timeout_s=case.timeout_s) for data in burst)
            outcomes = await asyncio.gather(*calls)
            await look()
            await mesh.assert_quiet()
            return list(outcomes)

        for outcome in mesh.run(fire()):
            assert outcome.code in allowed, (outcome.code, outcome.details)
            seen.add(outcome.code)

    # What every case must see refused, and what it must see taken.
    for data in (NO_MESSAGE, *map(encoded, good)):
        outcome = mesh.run(mesh.call(node, method, data, timeout_s=case.timeout_s))
        assert outcome.code in allowed, (outcome.code, outcome.details)
        seen.add(outcome.code)
    bursts()
    mesh.run(mesh.assert_unharmed())
    return seen
