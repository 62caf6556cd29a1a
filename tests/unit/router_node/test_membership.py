"""Nodes behind DNS names come and go; those that are listed stay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from pdmesh.v1 import mesh_pb2
from unit.router_node.fakes import StartNode, StartRouter, finish_event, tokens_event

from router_node.membership import Membership
from router_node.node_pool import ComputeRole, NodeFacts, NodePool, TokenLimits

PREFILL, DECODE = ComputeRole.PREFILL, ComputeRole.DECODE


class Names:
    """A resolver that says what it is told to."""

    def __init__(self, **answers: Sequence[str] | OSError) -> None:
        self.answers = answers

    async def __call__(self, host: str) -> Sequence[str]:
        answer = self.answers[host]
        if isinstance(answer, OSError):
            raise answer
        return answer


def _membership(names: Names) -> tuple[Membership, NodePool, list[None]]:
    pool, changes = NodePool({}, vocab_size=10), []
    listed = {PREFILL: ["dns:prefill:7701"], DECODE: ["fixed:7702", "dns:decode:7702"]}
    membership = Membership(listed, pool, interval_s=600, on_change=lambda: changes.append(None), resolve=names)
    return membership, pool, changes


async def test_every_address_of_a_name_is_a_node() -> None:
    membership, pool, _ = _membership(Names(prefill=["10.0.0.1", "10.0.0.2"], decode=["fd00::1"]))
    await membership.refresh()
    assert pool.addresses == ("10.0.0.1:7701", "10.0.0.2:7701", "fixed:7702", "[fd00::1]:7702")


async def test_nodes_come_and_go_with_the_name_and_what_is_known_of_the_rest_stays() -> None:
    names = Names(prefill=["10.0.0.1", "10.0.0.2"], decode=[])
    membership, pool, changes = _membership(names)
    await membership.refresh()
    facts = NodeFacts(
        address="10.0.0.1:7701",
        node_id="p",
        incarnation=1,
        role=PREFILL,
        model_fingerprint="m",
        vocab_size=10,
        limits=TokenLimits(context_tokens=9, max_request_tokens=9),
    )
    pool.record_answer(facts, is_serving=True)
    await membership.refresh()
    assert len(changes) == 1
    names.answers = {"prefill": ["10.0.0.1", "10.0.0.3"], "decode": []}
    await membership.refresh()
    assert len(changes) == 2
    assert pool.addresses == ("10.0.0.1:7701", "10.0.0.3:7701", "fixed:7702")
    assert [node.facts.node_id for node in pool.usable(PREFILL)] == ["p"]
    # What comes late about one that left changes nothing.
    pool.record_failure("10.0.0.2:7701", "gone")
    pool.distrust(["10.0.0.2:7701"])
    assert pool.facts_of("10.0.0.2:7701") is None


async def test_a_name_that_cannot_be_resolved_keeps_its_nodes(caplog: pytest.LogCaptureFixture) -> None:
    names = Names(prefill=["10.0.0.1"], decode=OSError("no such host"))
    membership, pool, _ = _membership(names)
    await membership.refresh()
    assert pool.addresses == ("10.0.0.1:7701", "fixed:7702")
    names.answers = {"prefill": OSError("try again"), "decode": ["10.0.0.9"]}
    await membership.refresh()
    assert pool.addresses == ("10.0.0.1:7701", "fixed:7702", "10.0.0.9:7702")
    assert "dns:prefill:7701 cannot be resolved, its 1 nodes are kept: try again" in caplog.text


async def test_without_names_nothing_is_asked_again() -> None:
    pool = NodePool({}, vocab_size=10)
    membership = Membership({DECODE: ["a:1"]}, pool, interval_s=600, on_change=lambda: None, resolve=Names())
    await membership.refresh()
    await membership.run()
    assert pool.addresses == ("a:1",)


async def test_the_system_resolves_numbers_and_the_local_host() -> None:
    pool = NodePool({}, vocab_size=10)
    await Membership({DECODE: ["dns:127.0.0.1:5"]}, pool, interval_s=600, on_change=lambda: None).refresh()
    assert pool.addresses == ("127.0.0.1:5",)


async def test_a_router_follows_the_name_and_hangs_up_on_who_left(
    start_node: StartNode, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [tokens_event("ab"), finish_event()]
    node = await start_node(mesh_pb2.NODE_ROLE_FUSED, "f-1", script=script)
    port = node.address.rpartition(":")[2]
    hosts: list[str] = []

    async def resolve(host: str) -> Sequence[str]:
        return list(hosts)

    monkeypatch.setattr("node_runtime.dns_names.resolve_host", resolve)
    hosts.append("127.0.0.1")
    running = await start_router(fused=(f"dns:fused:{port}",), resolve_interval_s=0.02, poll_interval_s=0.02)
    router = running.router
    placement, *_ = await running.generate(text="hi", max_tokens=2)
    assert placement.placement.decode_node == "f-1"
    assert node.address in router._channels._channels
    hosts.clear()
    async with asyncio.timeout(20):
        while node.address in router._channels._channels or router._pool.addresses:
            await asyncio.sleep(0.01)
    status, _ = await running.refusal(text="hi", max_tokens=2)
    assert status.name == "UNAVAILABLE"
    hosts.append("127.0.0.1")
    async with asyncio.timeout(20):
        while not router._pool.is_ready:
            await asyncio.sleep(0.01)
    placement, *_ = await running.generate(text="hi", max_tokens=2)
    assert placement.placement.decode_node == "f-1"
