"""Whoever scrapes a node of any role finds the metrics that the documentation promises, and no others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
from support.documented_metrics import ROLES, DocumentedMetric, documented_metrics
from support.fake_mesh import FakeMesh, until
from support.fake_router import FakeRouter
from support.prometheus import scrape

from node_runtime.rpc import Metrics, Telemetry

PROMPT = list(range(40, 77))
DOCUMENTED = documented_metrics()


class Scraped:
    """The telemetry of one node, read by a scraper."""

    def __init__(self, role: str) -> None:
        metrics = Metrics.setup(f"pdmesh-{role}", role, otlp_endpoint=None, is_scraped=True)
        self.telemetry = Telemetry(None, metrics)
        self._address = metrics.serve("127.0.0.1", 0)

    async def names_and_states(self) -> tuple[set[str], dict[str, set[str]]]:
        """Every name of ours, and the states that those with a label of that name are told for."""
        names, states = set[str](), dict[str, set[str]]()
        for sample in await asyncio.to_thread(scrape, self._address):
            name, _, labels = sample.partition("{")
            if not name.startswith(("pdmesh_", "gen_ai_")):
                continue
            names.add(name)
            states.setdefault(name, set()).update(re.findall(r'\bstate="(\w+)"', labels))
        return names, states


@pytest.fixture
def scraped() -> Iterator[dict[str, Scraped]]:
    nodes = {role: Scraped(role) for role in ROLES}
    yield nodes
    for node in nodes.values():
        node.telemetry.shutdown()


def _of(role: str) -> list[DocumentedMetric]:
    return [metric for metric in DOCUMENTED if role in metric.roles]


async def test_every_node_shows_what_is_documented_and_nothing_else(
    mesh: FakeMesh, scraped: dict[str, Scraped]
) -> None:
    prefill = await mesh.prefill(telemetry=scraped["prefill"].telemetry)
    decode = await mesh.decode(prefill, telemetry=scraped["decode"].telemetry)
    fused = await mesh.fused(telemetry=scraped["fused"].telemetry)
    await mesh.generate(fused, PROMPT)
    await until(lambda: decode.node.is_ready, "the decode node has its peer")
    async with FakeRouter(prefill=[prefill], decode=[decode], telemetry=scraped["router"].telemetry) as router:
        # The second one finds the first one's prompt in both caches.
        for _ in range(2):
            await router.generate(PROMPT)
        everything = frozenset[str]().union(*(metric.prometheus_names for metric in DOCUMENTED))
        for role, node in scraped.items():
            names, states = await node.names_and_states()
            assert {name for metric in _of(role) for name in metric.prometheus_names} <= names, role
            assert {name.removesuffix("_created") for name in names if not name.endswith("_created")} <= everything
            for metric in _of(role):
                assert frozenset().union(*(states[name] for name in metric.prometheus_names)) == metric.states, metric


def test_the_table_is_read_whole() -> None:
    assert len(DOCUMENTED) > 20
    peers = next(metric for metric in DOCUMENTED if metric.name == "pdmesh.peers")
    assert (peers.states, peers.roles) == ({"ready", "connecting", "suspect", "draining"}, set(ROLES))
