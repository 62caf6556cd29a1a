"""Where requests run: gathers what is known about the usable nodes, asks the policy, and counts what was placed.

Lives on the router's event loop, without I/O. The decision itself is `placement_policy`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from pdmesh.v1 import inference_pb2

from node_runtime.adapters import AdapterId
from node_runtime.clock import Clock, SystemClock
from node_runtime.errors import NodeError, PeerUnavailable, RequestTooLarge
from node_runtime.rpc import span_names
from router_node.node_pool import ComputeRole, NodeFacts, NodePool, UsableNode
from router_node.observations import Carried, Observations, Work
from router_node.placement_policy import (
    PENALTY_BROKEN,
    PENALTY_REFUSED,
    Decision,
    Demand,
    NodeView,
    PolicyName,
    decide,
)
from router_node.prompt_prefixes import PromptPrefixes

__all__ = ["PENALTY_BROKEN", "PENALTY_REFUSED", "NoUsableNode", "Occupation", "PlacementChoice", "Placer"]

_NO_PENALTIES: Mapping[str, int] = MappingProxyType({})
_DEFAULT_MAX_KEYS_PER_NODE: Final = 65_536
_MS_PER_S: Final = 1000.0


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
    # What led to it, and the prompt that it is for; None where the choice was not made by a Placer.
    decision: Decision | None = field(default=None, compare=False)
    demand: Demand | None = field(default=None, compare=False)
    prefixes: PromptPrefixes | None = field(default=None, compare=False)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(node.address for node in self.nodes())

    def nodes(self) -> Iterator[NodeFacts]:
        yield self.decode
        if self.prefill is not None:
            yield self.prefill

    def explanation(self) -> dict[str, str | int | float | Sequence[str]]:
        """Attributes for the trace."""
        decision = self.decision
        if decision is None:
            return {}
        pair, estimate = decision.pair, decision.estimate
        return {
            span_names.PDMESH_DECODE_NODE: self.decode.node_id,
            span_names.PDMESH_PREFILL_NODE: "" if self.prefill is None else self.prefill.node_id,
            span_names.PDMESH_PLACE_POLICY: decision.policy,
            span_names.PDMESH_PLACE_REASON: decision.reason,
            span_names.PDMESH_PLACE_CANDIDATES: decision.num_candidates,
            span_names.PDMESH_PLACE_RUNNERS_UP: [
                f"{other}: {each.total_s * _MS_PER_S:,.1f} ms, {other.computes.cached_tokens:,} cached"
                for other, each in decision.runners_up
            ],
            span_names.PDMESH_PLACE_PREFILL_CACHED_TOKENS: pair.computes.cached_tokens,
            span_names.PDMESH_PLACE_DECODE_CACHED_TOKENS: pair.decode.cached_tokens,
            span_names.PDMESH_PLACE_QUEUE_MS: estimate.queue_s * _MS_PER_S,
            span_names.PDMESH_PLACE_COMPUTE_MS: estimate.compute_s * _MS_PER_S,
            span_names.PDMESH_PLACE_TRANSFER_MS: estimate.transfer_s * _MS_PER_S,
            span_names.PDMESH_PLACE_DECODE_MS: estimate.decode_s * _MS_PER_S,
            span_names.PDMESH_PLACE_WORK_MS: estimate.work_s * _MS_PER_S,
            span_names.PDMESH_PLACE_SHARE_MS: estimate.share_s * _MS_PER_S,
        }

    def __str__(self) -> str:
        return " with ".join(str(node) for node in self.nodes())


class Occupation:
    """A request that occupies its nodes. Tell it what becomes known."""

    def __init__(self, observations: Observations, carried: Carried) -> None:
        self._observations = observations
        self._carried = carried

    def end_prefill(
        self,
        *,
        prompt_tokens: int = 0,
        cached: inference_pb2.CachedTokens | None = None,
        timings: inference_pb2.Timings | None = None,
    ) -> None:
        """The prompt is computed and its cache in place; what the nodes measured makes later estimates better."""
        self._carried.end_prefill()
        if timings is not None and timings.transferred_bytes:
            shipped_tokens = prompt_tokens - (0 if cached is None else cached.decode_device)
            self._observations.note_transfer(shipped_tokens, timings.transfer_ms / _MS_PER_S)


class Placer:
    """Choices and the load that they make."""

    def __init__(
        self,
        pool: NodePool,
        *,
        policy: PolicyName = "cache_aware",
        observations: Observations | None = None,
        clock: Clock | None = None,
    ) -> None:
        """By default nothing but this router's own placements is known, and the clock is the system's."""
        self._pool = pool
        self._policy: PolicyName = policy
        self._observations = observations or Observations(max_keys_per_node=_DEFAULT_MAX_KEYS_PER_NODE)
        self._clock = clock or SystemClock()

    def num_in_flight(self, address: str) -> int:
        """Requests of this router."""
        return self._observations.num_requests(address)

    def choose(
        self,
        *,
        prompt_tokens: int,
        max_tokens: int,
        penalties: Mapping[str, int] = _NO_PENALTIES,
        prefixes: PromptPrefixes | None = None,
        adapter: AdapterId | None = None,
    ) -> PlacementChoice:
        """Nodes with a penalty, by address, are chosen after all others, those with a higher one last.

        `prefixes` are those of the prompt; without them no cache is looked at. Nodes without the `adapter` are left
        out, as are those that have another one of its name. Raises NoUsableNode, or RequestTooLarge when the request
        fits none of the usable nodes.
        """
        if not self._pool.is_ready:
            raise NoUsableNode(self._pool.describe_lack())
        prefill = _having(adapter, self._pool.usable(ComputeRole.PREFILL))
        decode = _having(adapter, (*self._pool.usable(ComputeRole.FUSED), *self._pool.usable(ComputeRole.DECODE)))
        if not any(prefill or node.facts.needs_no_prefill for node in decode):
            raise NoUsableNode(f"no usable nodes have the adapter {adapter}")
        demand = Demand(
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, beginning=self._beginning(prefixes, (*decode, *prefill))
        )
        prefill_views = self._views(prefill, penalties, prefixes)
        decode_views = self._views(decode, penalties, prefixes)
        decision = decide(prefill_views, decode_views, demand, policy=self._policy, rates=self._observations.rates)
        if decision is None:
            raise self._too_large(prompt_tokens, max_tokens, prefill, decode)
        pair = decision.pair
        return PlacementChoice(
            decode=pair.decode.facts,
            prefill=None if pair.prefill is None else pair.prefill.facts,
            decision=decision,
            demand=demand,
            prefixes=prefixes,
        )

    @contextmanager
    def occupied(self, choice: PlacementChoice) -> Iterator[Occupation]:
        """Counts the request as in flight on the chosen nodes."""
        observations, began_at_s = self._observations, self._clock.now_s()
        with (
            observations.carrying(_works(choice), began_at_s) as carried,
            observations.index.expecting(_expected_keys(choice), choice.addresses),
        ):
            yield Occupation(observations, carried)
        observations.note_residence(self._clock.now_s() - began_at_s)

    def _views(
        self, nodes: Sequence[UsableNode], penalties: Mapping[str, int], prefixes: PromptPrefixes | None
    ) -> list[NodeView]:
        observations, now_s = self._observations, self._clock.now_s()
        is_looked_at = prefixes if self._policy == "cache_aware" else None
        cached = observations.cached_tokens(is_looked_at, (node.facts for node in nodes))
        views = []
        for node in nodes:
            facts = node.facts
            load = observations.load_of(facts.address)
            foreign_tokens = load.num_foreign_requests * observations.mean_prefill_tokens
            views.append(
                NodeView(
                    facts=facts,
                    penalty=penalties.get(facts.address, 0),
                    is_trusted=node.is_trusted,
                    num_requests=load.num_all_requests,
                    cached_tokens=cached.get(facts.address, 0),
                    queued_tokens=load.prefill_tokens + (0.0 if facts.role is ComputeRole.DECODE else foreign_tokens),
                    share_tokens=load.share_tokens(now_s),
                    prefill_tokens_per_s=load.prefill_tokens_per_s,
                    decode_step_s=load.decode_step_s,
                    free_tokens=load.free_tokens(facts.capacity_tokens),
                    last_turn=load.last_turn,
                    peers=load.peers,
                )
            )
        return views

    def _beginning(self, prefixes: PromptPrefixes | None, nodes: Iterable[UsableNode]) -> bytes:
        if prefixes is None or self._policy != "pinned":
            return b""
        # All routers know the same nodes and take the same granularity.
        granularity = max((node.facts.prefix_granularity for node in nodes), default=0)
        return prefixes.beginning(granularity or 1)

    def _too_large(
        self, prompt_tokens: int, max_tokens: int, prefill: Sequence[UsableNode], decode: Sequence[UsableNode]
    ) -> RequestTooLarge:
        """Names the node that can hold most, of those that hold back the request."""
        has_prefill = any(prompt_tokens < node.facts.limits.tokens for node in prefill)
        able = [node for node in decode if has_prefill or node.facts.needs_no_prefill]
        largest = max((node.facts for node in able or prefill), key=lambda facts: facts.limits.tokens)
        return RequestTooLarge(
            f"max_tokens: {max_tokens} with a prompt of {prompt_tokens} tokens exceeds {largest.limits.tokens} tokens, "
            f"the most that {largest} can hold for one request"
        )


def _having(adapter: AdapterId | None, nodes: Sequence[UsableNode]) -> Sequence[UsableNode]:
    return nodes if adapter is None else tuple(node for node in nodes if adapter in node.facts.adapters)


def _works(choice: PlacementChoice) -> tuple[Work, ...]:
    """What the request costs each of its nodes."""
    demand, decision = choice.demand, choice.decision
    if demand is None or decision is None:
        return tuple(Work(address=address, prefill_tokens=0, memory_tokens=0) for address in choice.addresses)
    decode, prefill = decision.pair.decode, decision.pair.prefill
    uncached_tokens = demand.prompt_tokens - decision.pair.computes.cached_tokens
    memory_tokens = demand.prompt_tokens - decode.cached_tokens + demand.headroom_tokens
    work = Work(
        address=decode.facts.address,
        prefill_tokens=uncached_tokens if prefill is None else 0,
        memory_tokens=memory_tokens,
    )
    if prefill is None:
        return (work,)
    return work, Work(address=prefill.facts.address, prefill_tokens=uncached_tokens, memory_tokens=uncached_tokens)


def _expected_keys(choice: PlacementChoice) -> Sequence[int]:
    """What the nodes will have cached, and do not say yet. Empty where nobody looks at caches."""
    decision, granularity = choice.decision, choice.decode.prefix_granularity
    if choice.prefixes is None or decision is None or decision.policy != "cache_aware" or not granularity:
        return ()
    keys = choice.prefixes.keys(granularity)
    cached_tokens = min(view.cached_tokens for view in (decision.pair.decode, decision.pair.computes))
    return keys[cached_tokens // granularity :]
