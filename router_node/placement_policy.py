"""Which pair of nodes a request goes to: a pure function of what is known about the nodes, and the reasons.

Sans-IO: no clock, no random numbers, no memory of earlier decisions. Whether a node may be used at all, and which nodes
failed this request, comes before every policy; the policy decides among those that are equal in that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from router_node.node_pool import ComputeRole, NodeFacts

PolicyName: TypeAlias = Literal["cache_aware", "least_loaded", "round_robin", "pinned"]

# How much a node is avoided: the higher, the later it is chosen.
PENALTY_BROKEN: Final = 2
PENALTY_REFUSED: Final = 3
# A decode node that must prefill itself, at the cost of its streams: better than one prefill node that broke, and no
# way round one that refused, because the load that it refused would land on the streams of all.
_PENALTY_LOCAL: Final = 1

# Of each role no more nodes than this are combined into pairs: the best by themselves.
_MAX_COMBINED: Final = 4
# Completion tokens for which a decode node secures memory at first.
_HEADROOM_TOKENS: Final = 4096

_Rank: TypeAlias = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRates:
    """What the estimates are made with where nodes did not measure it. Seconds, and tokens per second."""

    prefill_tokens_per_s: float = 5000.0
    # Of the cache through the data plane.
    transfer_tokens_per_s: float = 50_000.0
    handoff_s: float = 0.005
    # The first use of a pair that is not proved yet.
    bootstrap_s: float = 0.1
    # What one more stream on a decode node costs the others, as a delay of one first token.
    stream_s: float = 0.002
    # How long a stream holds its memory.
    residence_s: float = 10.0
    # What a second of computing costs those who come behind, beside the request that it is for.
    work_weight: float = 4.0
    # How far a node's share of the work may exceed the mean before it counts, and what the rest counts for.
    share_slack: float = 0.25
    share_weight: float = 0.1

    def __post_init__(self) -> None:
        rates = {
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "transfer_tokens_per_s": self.transfer_tokens_per_s,
            "residence_s": self.residence_s,
        }
        for name, value in rates.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: {value} given, a positive number required")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What is known of one node for one request. Tokens of its prompt, and of prompts that wait before it.

    `peers`: of a decode node, which prefill nodes, by address, are proved (True) or known not to work (False).
    """

    facts: NodeFacts
    penalty: int = 0
    is_trusted: bool = True
    num_requests: int = 0
    cached_tokens: int = 0
    queued_tokens: float = 0.0
    share_tokens: float = 0.0
    # 0: not measured.
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    # None: not known.
    free_tokens: int | None = None
    last_turn: int = 0
    peers: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def own_rank(self) -> tuple[int, bool]:
        return self.penalty, not self.is_trusted


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs. `beginning` names the beginning of its prompt."""

    prompt_tokens: int
    max_tokens: int
    beginning: bytes = b""

    @property
    def headroom_tokens(self) -> int:
        return min(self.max_tokens, _HEADROOM_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Parts of the time to first token that a pair would have, and what else speaks against it, in seconds."""

    queue_s: float
    compute_s: float
    # What of the transfer no computation hides, and the handoff itself.
    transfer_s: float
    # Streams beside it, and memory that must come free first.
    decode_s: float
    # What the computation costs those who come behind.
    work_s: float
    # The node has had more than its share.
    share_s: float

    @property
    def total_s(self) -> float:
        return self.queue_s + self.compute_s + self.transfer_s + self.decode_s + self.work_s + self.share_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Where a request could go. `prefill` is None where the decode node computes the prompt itself."""

    decode: NodeView
    prefill: NodeView | None

    @property
    def computes(self) -> NodeView:
        """The node that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def is_known_not_to_work(self) -> bool:
        return self.prefill is not None and self.decode.peers.get(self.prefill.facts.address) is False

    @property
    def is_proved(self) -> bool:
        return self.prefill is None or self.decode.peers.get(self.prefill.facts.address) is True

    def __str__(self) -> str:
        return " > ".join(view.facts.node_id for view in (self.prefill, self.decode) if view is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The pair and why. `runners_up` are the next best, best first."""

    pair: Pair
    estimate: Estimate
    policy: PolicyName
    reason: str
    num_candidates: int
    runners_up: tuple[tuple[Pair, Estimate], ...]


def decide(
    prefill: Sequence[NodeView],
    decode: Sequence[NodeView],
    demand: Demand,
    *,
    policy: PolicyName,
    rates: CostRates,
) -> Decision | None:
    """The best pair of usable nodes; None when the request fits none. `decode` are decode and fused nodes.

    Nodes with a penalty come after all others, those with a higher one last, then distrusted ones, then pairs whose
    data plane is known not to work.
    """
    # A prefill node holds the prompt and the first token; the node that decodes holds everything.
    prefill = _fitting(prefill, demand.prompt_tokens + 1)
    decode = _fitting(decode, demand.prompt_tokens + demand.max_tokens)
    ranker = _Ranker(prefill, decode, demand, policy, rates)
    ranked = sorted(ranker.pairs(), key=ranker.rank)
    if not ranked:
        return None
    best, *others = ranked
    return Decision(
        pair=best,
        estimate=ranker.estimate(best),
        policy=policy,
        reason=ranker.reason(best, others),
        num_candidates=len(ranked),
        runners_up=tuple((pair, ranker.estimate(pair)) for pair in others[:3]),
    )


class _Ranker:
    """The order of pairs for one request."""

    def __init__(
        self,
        prefill: Sequence[NodeView],
        decode: Sequence[NodeView],
        demand: Demand,
        policy: PolicyName,
        rates: CostRates,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._demand = demand
        self._rates = rates
        self._policy = policy
        self._computing: dict[str, tuple[float, float, float]] = {}
        self._decoding: dict[str, tuple[float, float]] = {}
        computing = (*prefill, *(view for view in decode if view.facts.role is ComputeRole.FUSED))
        measured = [view.prefill_tokens_per_s for view in computing if view.prefill_tokens_per_s > 0]
        self._default_tokens_per_s = sum(measured) / len(measured) if measured else rates.prefill_tokens_per_s
        self._mean_share_tokens = sum(view.share_tokens for view in computing) / max(1, len(computing))

    def pairs(self) -> Iterator[Pair]:
        """Everything that may be chosen."""
        fused = [view for view in self._decode if view.facts.role is ComputeRole.FUSED]
        others = [view for view in self._decode if view.facts.role is not ComputeRole.FUSED]
        yield from (Pair(decode=view, prefill=None) for view in fused)
        prefill = self._best_alone(self._prefill, lambda view: Pair(decode=view, prefill=None))
        if min((view.penalty for view in prefill), default=PENALTY_BROKEN) == PENALTY_BROKEN:
            yield from (Pair(decode=view, prefill=None) for view in others if view.facts.prefills_locally)
        if prefill:
            first = prefill[0]
            for view in self._best_alone(others, lambda view: Pair(decode=view, prefill=first)):
                yield from (Pair(decode=view, prefill=each) for each in prefill)

    def rank(self, pair: Pair) -> _Rank:
        """Pairs with a lower one are better."""
        decode, prefill = pair.decode, pair.prefill
        if prefill is not None:
            detour, is_distrusted = prefill.penalty, not prefill.is_trusted
        else:
            detour, is_distrusted = 0 if decode.facts.role is ComputeRole.FUSED else _PENALTY_LOCAL, False
        return (
            max(detour, decode.penalty),
            decode.penalty,
            detour,
            not decode.is_trusted,
            is_distrusted,
            pair.is_known_not_to_work,
            *self._order(pair),
            decode.last_turn,
            0 if prefill is None else prefill.last_turn,
        )

    def estimate(self, pair: Pair) -> Estimate:
        """What the request would wait for there."""
        queue_s, compute_s, share_s = self._computing_s(pair.computes)
        shipping_s, decode_s = self._decoding_s(pair.decode)
        return Estimate(
            queue_s=queue_s,
            compute_s=compute_s,
            transfer_s=0.0 if pair.prefill is None else self._transfer_s(pair, compute_s, shipping_s),
            decode_s=decode_s,
            work_s=self._rates.work_weight * compute_s,
            share_s=share_s,
        )

    def reason(self, best: Pair, others: Sequence[Pair]) -> str:
        """Why it is this pair, in a few words."""
        if not others:
            return "the only pair"
        if best.computes.penalty or best.decode.penalty:
            return "the least bad: all failed this request"
        if self._policy != "cache_aware":
            return {"least_loaded": "fewest requests", "round_robin": "its turn", "pinned": "the prompt's beginning"}[
                self._policy
            ]
        longest = max(pair.computes.cached_tokens for pair in (best, *others))
        if longest == 0:
            return "nothing is cached: the shortest wait"
        if best.computes.cached_tokens == longest:
            return "the longest cached prefix"
        return "a longer prefix is cached where the wait is longer"

    # Parts of the estimates, each made once.

    def _computing_s(self, view: NodeView) -> tuple[float, float, float]:
        """Queue, computation and excess share of a node that computes the prompt."""
        known = self._computing.get(view.facts.address)
        if known is None:
            rates = self._rates
            tokens_per_s = view.prefill_tokens_per_s or self._default_tokens_per_s
            excess_tokens = view.share_tokens - (1 + rates.share_slack) * self._mean_share_tokens
            known = self._computing[view.facts.address] = (
                view.queued_tokens / tokens_per_s,
                (self._demand.prompt_tokens - view.cached_tokens) / tokens_per_s,
                rates.share_weight * max(0.0, excess_tokens) / tokens_per_s,
            )
        return known

    def _decoding_s(self, view: NodeView) -> tuple[float, float]:
        """The whole transfer to a node that decodes; its streams, and the wait for memory."""
        known = self._decoding.get(view.facts.address)
        if known is None:
            demand, rates = self._demand, self._rates
            lacking_tokens = demand.prompt_tokens - view.cached_tokens
            wait_s = 0.0
            if view.free_tokens is not None:
                homeless_tokens = lacking_tokens + demand.headroom_tokens - view.free_tokens
                capacity_tokens = view.facts.capacity_tokens or view.facts.limits.max_request_tokens
                wait_s = rates.residence_s * max(0, homeless_tokens) / capacity_tokens
            known = self._decoding[view.facts.address] = (
                lacking_tokens / rates.transfer_tokens_per_s,
                view.decode_step_s + rates.stream_s * view.num_requests + wait_s,
            )
        return known

    def _transfer_s(self, pair: Pair, compute_s: float, shipping_s: float) -> float:
        """What nothing hides: layers are sent while later ones are computed."""
        bootstrap_s = 0.0 if pair.is_proved else self._rates.bootstrap_s
        return max(0.0, shipping_s - compute_s) + self._rates.handoff_s + bootstrap_s

    def _best_alone(self, views: Sequence[NodeView], pair_with: Callable[[NodeView], Pair]) -> Sequence[NodeView]:
        """The best of many by themselves, so that only few are combined."""
        if len(views) <= _MAX_COMBINED:
            return views
        return sorted(views, key=lambda view: (*view.own_rank, *self._order(pair_with(view)), view.last_turn))[
            :_MAX_COMBINED
        ]

    # Policies.

    def _order(self, pair: Pair) -> _Rank:
        match self._policy:
            case "cache_aware":
                return self._by_cost(pair)
            case "least_loaded":
                return self._by_load(pair)
            case "round_robin":
                return self._by_turn(pair)
            case "pinned":
                return self._by_beginning(pair)

    def _by_cost(self, pair: Pair) -> _Rank:
        queue_s, compute_s, share_s = self._computing_s(pair.computes)
        shipping_s, decode_s = self._decoding_s(pair.decode)
        transfer_s = 0.0 if pair.prefill is None else self._transfer_s(pair, compute_s, shipping_s)
        return (queue_s + (1 + self._rates.work_weight) * compute_s + transfer_s + decode_s + share_s,)

    def _by_load(self, pair: Pair) -> _Rank:
        return pair.decode.num_requests, 0 if pair.prefill is None else pair.prefill.num_requests

    def _by_turn(self, pair: Pair) -> _Rank:
        return ()

    def _by_beginning(self, pair: Pair) -> _Rank:
        """Rendezvous hashing: all routers agree, and when a node comes or goes, only its share moves."""
        beginning = self._demand.beginning
        decode = _weight(beginning, pair.decode.facts.node_id)
        return -decode, 0 if pair.prefill is None else -_weight(beginning, pair.prefill.facts.node_id)


def _weight(beginning: bytes, node_id: str) -> int:
    digest = hashlib.blake2b(beginning + node_id.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


def _fitting(views: Iterable[NodeView], num_tokens: int) -> tuple[NodeView, ...]:
    return tuple(view for view in views if num_tokens <= view.facts.limits.tokens)
