"""Chooses where a request runs: the usable nodes with the fewest requests in flight, in turn where these are equal.

Knows what this router has in flight and nothing of other routers. Lives on the router's event loop, without I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from node_runtime.errors import NodeError, PeerUnavailable, RequestTooLarge
from router_node.node_pool import ComputeRole, NodeFacts, NodePool, UsableNode

_NO_PENALTIES: Mapping[str, int] = MappingProxyType({})


class NoUsableNode(PeerUnavailable):
    """The pools hold no node, or no pair of nodes, that could serve a request now."""

    retry_after_s = 1.0

    def __init__(self, reason: str) -> None:
        NodeError.__init__(self, reason)
        self.address = ""
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChoice:
    """`prefill` is None when `decode` is a fused node."""

    decode: NodeFacts
    prefill: NodeFacts | None

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(node.address for node in self._nodes())

    def __str__(self) -> str:
        return " with ".join(str(node) for node in self._nodes())

    def _nodes(self) -> Iterator[NodeFacts]:
        yield self.decode
        if self.prefill is not None:
            yield self.prefill


class Placer:
    """Choices and the load that they make."""

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self._num_in_flight: Counter[str] = Counter()
        self._last_turn: dict[str, int] = {}
        self._turn = 0

    def num_in_flight(self, address: str) -> int:
        return self._num_in_flight[address]

    def choose(
        self, *, prompt_tokens: int, max_tokens: int, penalties: Mapping[str, int] = _NO_PENALTIES
    ) -> PlacementChoice:
        """Nodes with a penalty, by address, are chosen after all others, those with a higher one last.

        Raises NoUsableNode, or RequestTooLarge when the request fits none of the usable nodes.
        """
        if not self._pool.is_ready:
            raise NoUsableNode(self._pool.describe_lack())
        prefill = self._pool.usable(ComputeRole.PREFILL)
        decode = self._pool.usable(ComputeRole.FUSED)
        # A prefill node holds the prompt and the first token; the node that decodes holds everything.
        prefill_fitting = _fitting(prefill, prompt_tokens + 1)
        if prefill_fitting:
            decode = (*decode, *self._pool.usable(ComputeRole.DECODE))
        decode_fitting = _fitting(decode, prompt_tokens + max_tokens)
        if not decode_fitting:
            raise _too_large(prompt_tokens, max_tokens, decode or prefill)
        chosen = self._best(decode_fitting, penalties)
        is_fused = chosen.role is ComputeRole.FUSED
        return PlacementChoice(decode=chosen, prefill=None if is_fused else self._best(prefill_fitting, penalties))

    @contextmanager
    def occupied(self, choice: PlacementChoice) -> Iterator[None]:
        """Counts the request as in flight on the chosen nodes."""
        self._turn += 1
        for address in choice.addresses:
            self._num_in_flight[address] += 1
            self._last_turn[address] = self._turn
        try:
            yield
        finally:
            self._num_in_flight.subtract(choice.addresses)

    def _best(self, nodes: Iterable[UsableNode], penalties: Mapping[str, int]) -> NodeFacts:
        def rank(node: UsableNode) -> tuple[int, bool, int, int]:
            address = node.facts.address
            penalty, num_in_flight = penalties.get(address, 0), self._num_in_flight[address]
            return (penalty, not node.is_trusted, num_in_flight, self._last_turn.get(address, 0))

        return min(nodes, key=rank).facts


def _fitting(nodes: Iterable[UsableNode], num_tokens: int) -> tuple[UsableNode, ...]:
    return tuple(node for node in nodes if num_tokens <= node.facts.limits.tokens)


def _too_large(prompt_tokens: int, max_tokens: int, nodes: Iterable[UsableNode]) -> RequestTooLarge:
    largest = max((node.facts for node in nodes), key=lambda facts: facts.limits.tokens)
    return RequestTooLarge(
        f"max_tokens: {max_tokens} with a prompt of {prompt_tokens} tokens exceeds {largest.limits.tokens} tokens, "
        f"the most that {largest} can hold for one request"
    )
