"""Chooses where a request runs: the usable nodes with the fewest requests in flight, in turn where these are equal.

Knows what this router has in flight and nothing of other routers. Lives on the router's event loop, without I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from node_runtime.errors import NodeError, PeerUnavailable, RequestTooLarge
from router_node.node_pool import ComputeRole, NodeFacts, NodePool, UsableNode

# How much a node is avoided: the higher, the later it is chosen.
PENALTY_BROKEN: Final = 2
PENALTY_REFUSED: Final = 3
# A decode node that must prefill itself, at the cost of its streams: better than one prefill node that broke, and no
# way round one that refused, because the load that it refused would land on the streams of all.
_PENALTY_LOCAL: Final = 1
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
    """`prefill` is None when `decode` is a fused node, or a decode node that is to prefill itself."""

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
        # A prefill node holds the prompt and the first token; the node that decodes holds everything.
        usable_prefill = self._pool.usable(ComputeRole.PREFILL)
        prefill = self._best(_fitting(usable_prefill, prompt_tokens + 1), lambda node: (_penalty(node, penalties), 0))
        decode = (
            *self._pool.usable(ComputeRole.FUSED),
            *(node for node in self._pool.usable(ComputeRole.DECODE) if prefill or node.facts.prefills_locally),
        )
        prefill_penalty = PENALTY_BROKEN if prefill is None else _penalty(prefill, penalties)

        def penalty_of(node: UsableNode) -> tuple[int, int]:
            detour = 0 if node.facts.role is ComputeRole.FUSED else prefill_penalty
            if detour == PENALTY_BROKEN and node.facts.prefills_locally:
                detour = _PENALTY_LOCAL
            own = _penalty(node, penalties)
            return max(detour, own), own

        chosen = self._best(_fitting(decode, prompt_tokens + max_tokens), penalty_of)
        if chosen is None:
            raise _too_large(prompt_tokens, max_tokens, decode or usable_prefill)
        is_local = prefill_penalty == PENALTY_BROKEN and chosen.facts.prefills_locally
        if chosen.facts.role is ComputeRole.FUSED or is_local or prefill is None:
            return PlacementChoice(decode=chosen.facts, prefill=None)
        return PlacementChoice(decode=chosen.facts, prefill=prefill.facts)

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

    def _best(
        self, nodes: Iterable[UsableNode], penalty_of: Callable[[UsableNode], tuple[int, int]]
    ) -> UsableNode | None:
        def rank(node: UsableNode) -> tuple[tuple[int, int], bool, int, int]:
            address = node.facts.address
            is_distrusted, num_in_flight = not node.is_trusted, self._num_in_flight[address]
            return (penalty_of(node), is_distrusted, num_in_flight, self._last_turn.get(address, 0))

        return min(nodes, key=rank, default=None)


def _penalty(node: UsableNode, penalties: Mapping[str, int]) -> int:
    return penalties.get(node.facts.address, 0)


def _fitting(nodes: Iterable[UsableNode], num_tokens: int) -> tuple[UsableNode, ...]:
    return tuple(node for node in nodes if num_tokens <= node.facts.limits.tokens)


def _too_large(prompt_tokens: int, max_tokens: int, nodes: Iterable[UsableNode]) -> RequestTooLarge:
    largest = max((node.facts for node in nodes), key=lambda facts: facts.limits.tokens)
    return RequestTooLarge(
        f"max_tokens: {max_tokens} with a prompt of {prompt_tokens} tokens exceeds {largest.limits.tokens} tokens, "
        f"the most that {largest} can hold for one request"
    )
