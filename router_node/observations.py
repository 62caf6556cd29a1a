"""What a router knows about the load and the caches of its nodes: what they told, and what it placed on them itself.

Pure bookkeeping; times come in. Whether a node may be used is not known here. Owned by the router's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from router_node.node_load import LoadReport, NodeLoad
from router_node.node_pool import NodeFacts
from router_node.placement_policy import CostRates
from router_node.prefix_index import PrefixIndex
from router_node.prompt_prefixes import PromptPrefixes

# What one more measurement counts for.
_NEWS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one request costs one node: prompt tokens to compute there, and tokens to keep memory for."""

    address: str
    prefill_tokens: int
    memory_tokens: int


class Observations:
    """Of all nodes, by address."""

    def __init__(self, *, max_keys_per_node: int, rates: CostRates | None = None) -> None:
        self.index = PrefixIndex(max_keys_per_node=max_keys_per_node)
        self._loads: dict[str, NodeLoad] = {}
        self._rates = rates or CostRates()
        self._mean_prefill_tokens = 0.0
        self._turn = 0

    @property
    def rates(self) -> CostRates:
        """Measured where something was measured."""
        return self._rates

    @property
    def mean_prefill_tokens(self) -> float:
        """What a request of others, of which only the number is known, is taken to need."""
        return self._mean_prefill_tokens

    def num_requests(self, address: str) -> int:
        """Requests of this router on a node."""
        load = self._loads.get(address)
        return 0 if load is None else load.num_requests

    def load_of(self, address: str) -> NodeLoad:
        load = self._loads.get(address)
        if load is None:
            load = self._loads[address] = NodeLoad()
        return load

    def take_report(self, address: str, report: LoadReport) -> None:
        """A node told how it is."""
        self.load_of(address).take_report(report)

    def forget(self, address: str) -> None:
        """The node left, or is another process."""
        self.index.forget(address)
        load = self._loads.get(address)
        if load is None:
            return
        load.forget_report()
        self._drop_if_left(address)

    def cached_tokens(self, prefixes: PromptPrefixes | None, nodes: Iterable[NodeFacts]) -> Mapping[str, int]:
        """By address, for the nodes that have some of the prompt cached: how much."""
        if prefixes is None:
            return {}
        by_granularity: dict[int, list[str]] = {}
        for facts in nodes:
            if facts.prefix_granularity:
                by_granularity.setdefault(facts.prefix_granularity, []).append(facts.address)
        cached: dict[str, int] = {}
        for granularity, addresses in by_granularity.items():
            for address, depth in self.index.find_depths(prefixes.keys(granularity), addresses).items():
                cached[address] = depth * granularity
        return cached

    @contextmanager
    def carrying(self, works: Sequence[Work], now_s: float) -> Iterator[Carried]:
        """Inside the block the request counts on these nodes."""
        self._turn += 1
        for work in works:
            load = self.load_of(work.address)
            load.num_requests += 1
            load.prefill_tokens += work.prefill_tokens
            load.memory_tokens += work.memory_tokens
            load.last_turn = self._turn
            load.add_share(work.prefill_tokens, now_s)
            if work.prefill_tokens:
                self._mean_prefill_tokens = _moved(self._mean_prefill_tokens, work.prefill_tokens)
        carried = Carried(self, works)
        try:
            yield carried
        finally:
            carried.end_prefill()
            for work in works:
                load = self.load_of(work.address)
                load.num_requests -= 1
                load.memory_tokens -= work.memory_tokens
                self._drop_if_left(work.address)

    def _drop_if_left(self, address: str) -> None:
        load = self._loads[address]
        if load.has_left and load.num_requests == 0:
            del self._loads[address]

    def note_transfer(self, num_tokens: int, duration_s: float) -> None:
        """The cache of that many tokens was moved in that time."""
        if num_tokens > 0 and duration_s > 0:
            measured = num_tokens / duration_s
            self._rates = replace(
                self._rates, transfer_tokens_per_s=_moved(self._rates.transfer_tokens_per_s, measured)
            )

    def note_residence(self, duration_s: float) -> None:
        """A request was served to its end in that time."""
        if duration_s > 0:
            self._rates = replace(self._rates, residence_s=_moved(self._rates.residence_s, duration_s))


class Carried:
    """One request on its nodes."""

    def __init__(self, observations: Observations, works: Sequence[Work]) -> None:
        self._observations = observations
        self._works = works
        self._is_prefilled = False

    def end_prefill(self) -> None:
        """The prompt is computed: it delays no other prompt any more. Idempotent."""
        if not self._is_prefilled:
            self._is_prefilled = True
            for work in self._works:
                self._observations.load_of(work.address).prefill_tokens -= work.prefill_tokens


def _moved(mean: float, value: float) -> float:
    return value if mean == 0 else mean + _NEWS * (value - mean)
