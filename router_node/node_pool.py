"""What the router knows about the compute nodes: who is there, who is usable, and why the others are not.

Pure bookkeeping, without I/O and clock: discovery reports what nodes answered, placement reads who is usable. Owned by
the router's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from pdmesh.v1 import mesh_pb2

from node_runtime.adapters import AdapterId

_log = logging.getLogger("pdmesh.router.pool")


class ComputeRole(Enum):
    """What a compute node is there for; the value is its name in messages."""

    PREFILL = "prefill"
    DECODE = "decode"
    FUSED = "fused"


ROLE_BY_WIRE: Mapping[int, ComputeRole] = MappingProxyType(
    {
        mesh_pb2.NODE_ROLE_PREFILL: ComputeRole.PREFILL,
        mesh_pb2.NODE_ROLE_DECODE: ComputeRole.DECODE,
        mesh_pb2.NODE_ROLE_FUSED: ComputeRole.FUSED,
    }
)


class NodeState(Enum):
    """Whether requests are sent to a node; the values are those of `PeerStatus.state`."""

    READY = "ready"
    CONNECTING = "connecting"
    SUSPECT = "suspect"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What holds for the life of a node's process, as it told by itself. Counts of tokens and rows."""

    address: str
    node_id: str
    incarnation: int
    role: ComputeRole
    model_fingerprint: str
    vocab_size: int
    limits: TokenLimits
    # A decode node that needs no prefill node.
    prefills_locally: bool = False
    # 0 where the node did not tell.
    prefix_granularity: int = 0
    capacity_tokens: int = 0
    # A node that decodes, and says from time to time that a request is well.
    reports_progress: bool = False
    # What requests can be computed with there.
    adapters: frozenset[AdapterId] = frozenset()

    @property
    def needs_no_prefill(self) -> bool:
        """Whether it can compute prompts and generate, all by itself."""
        return self.role is ComputeRole.FUSED or self.prefills_locally

    def __str__(self) -> str:
        return f"{self.role.value} node {self.node_id} at {self.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Most tokens of prompt and completion together: what the model allows, and what an arena can hold."""

    context_tokens: int
    max_request_tokens: int

    @property
    def tokens(self) -> int:
        """The smaller of the two."""
        return min(self.context_tokens, self.max_request_tokens)


@dataclass(slots=True, kw_only=True)
class _Entry:
    listed_as: ComputeRole
    state: NodeState = NodeState.CONNECTING
    detail: str = "not reached yet"
    facts: NodeFacts | None = None
    # False: a request failed there and the node has not answered since. It is the last to be chosen.
    is_trusted: bool = True

    @property
    def is_usable(self) -> bool:
        return self.state is NodeState.READY and self.facts is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableNode:
    """A node that requests may be sent to."""

    facts: NodeFacts
    is_trusted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCondition:
    """One node as the router's status reports it."""

    address: str
    role: ComputeRole
    facts: NodeFacts | None
    state: NodeState
    detail: str


class NodePool:
    """Every member, by address, and its latest condition.

    All usable nodes run the same model: the first usable node decides which, until no node of that model is left. Their
    vocabulary must be the tokenizer's.
    """

    def __init__(self, addresses: Mapping[ComputeRole, Sequence[str]], *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._fingerprint: str | None = None
        self._entries: dict[str, _Entry] = {}
        # Asked for by every request, and seldom another one.
        self._usable: dict[ComputeRole, tuple[UsableNode, ...]] = {}
        self._adapters: Mapping[str, AdapterId] | None = None
        self.set_members(addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def is_ready(self) -> bool:
        """Whether a request could be placed now."""
        return bool(self.usable(ComputeRole.FUSED)) or not self._lacking()

    @property
    def is_settled(self) -> bool:
        """Whether every configured node is usable and trusted: nothing to look after."""
        return all(entry.is_usable and entry.is_trusted for entry in self._entries.values())

    def set_members(self, addresses: Mapping[ComputeRole, Sequence[str]]) -> bool:
        """These are the nodes from now on; what is known of those that stay is kept. Whether any came or went."""
        listed: dict[str, ComputeRole] = {}
        for role, members in addresses.items():
            for address in members:
                listed.setdefault(address, role)
        known = {address: entry.listed_as for address, entry in self._entries.items()}
        if listed == known and list(listed) == list(known):
            return False
        for address in known.keys() - listed.keys():
            _log.info("%s node at %s is no member any more", known[address].value, address)
        self._forget_summaries()
        self._entries = {
            address: entry
            if (entry := self._entries.get(address)) is not None and entry.listed_as is role
            else _Entry(listed_as=role)
            for address, role in listed.items()
        }
        return True

    def facts_of(self, address: str) -> NodeFacts | None:
        """What the node at an address told; None where it told nothing, or is no member."""
        entry = self._entries.get(address)
        return None if entry is None else entry.facts

    def usable(self, role: ComputeRole) -> tuple[UsableNode, ...]:
        """In configured order."""
        usable = self._usable.get(role)
        if usable is None:
            usable = self._usable[role] = tuple(
                UsableNode(facts=entry.facts, is_trusted=entry.is_trusted)
                for entry in self._entries.values()
                if entry.is_usable and entry.facts is not None and entry.facts.role is role
            )
        return usable

    def adapters(self) -> Mapping[str, AdapterId]:
        """By name, what the members that decode told of, usable or not.

        Where they differ in what a name stands for, as they do while an adapter is replaced, most of them are right,
        those first with which a request could be placed.
        """
        if self._adapters is None:
            votes: dict[AdapterId, tuple[int, int]] = {}
            for entry in self._entries.values():
                if entry.facts is not None and entry.facts.role is not ComputeRole.PREFILL:
                    for adapter in entry.facts.adapters:
                        num_able, num_known = votes.get(adapter, (0, 0))
                        votes[adapter] = (num_able + self._is_able(entry, adapter), num_known + 1)
            self._adapters = {adapter.name: adapter for adapter in sorted(votes, key=lambda each: (votes[each], each))}
        return self._adapters

    def _is_able(self, entry: _Entry, adapter: AdapterId) -> bool:
        """Whether a request with the adapter could be placed on a node that has it."""
        if not entry.is_usable or entry.facts is None:
            return False
        return entry.facts.needs_no_prefill or any(
            adapter in node.facts.adapters for node in self.usable(ComputeRole.PREFILL)
        )

    def limits(self) -> TokenLimits | None:
        """Those of the usable node that can hold the longest request; None when no node is usable."""
        nodes = (*self.usable(ComputeRole.FUSED), *self.usable(ComputeRole.DECODE))
        return max((node.facts.limits for node in nodes), key=lambda limits: limits.tokens, default=None)

    def conditions(self) -> tuple[NodeCondition, ...]:
        """In configured order."""
        return tuple(
            NodeCondition(
                address=address,
                role=entry.listed_as,
                facts=entry.facts,
                state=_reported_state(entry),
                detail=entry.detail,
            )
            for address, entry in self._entries.items()
        )

    def record_answer(self, facts: NodeFacts, *, is_serving: bool, is_draining: bool = False) -> None:
        """The node at `facts.address` answered. Without effect when it is no member any more."""
        entry = self._entries.get(facts.address)
        if entry is None:
            return
        self._forget_summaries()
        entry.facts = facts
        entry.is_trusted = True
        fault = self._fault_of(entry, facts)
        if fault is not None:
            self._change(facts.address, NodeState.SUSPECT, fault)
        elif is_draining:
            self._change(facts.address, NodeState.DRAINING, f"{facts} is draining")
        elif not is_serving:
            self._change(facts.address, NodeState.CONNECTING, f"{facts} is not serving")
        else:
            self._fingerprint = facts.model_fingerprint
            self._change(facts.address, NodeState.READY, "")

    def record_failure(self, address: str, reason: str) -> None:
        """The node at `address` did not answer, or what it answered makes no sense."""
        self._change(address, NodeState.SUSPECT, reason)

    def record_draining(self, address: str) -> None:
        """The node at `address` refused a request because it leaves. It is not to blame, and gets no others."""
        self._change(address, NodeState.DRAINING, f"{self.facts_of(address) or address} is draining")

    def distrust(self, addresses: Iterable[str]) -> None:
        """A request failed on one of these nodes; until it answers again, others are preferred."""
        self._forget_summaries()
        for address in addresses:
            if address in self._entries:
                self._entries[address].is_trusted = False

    def describe_lack(self) -> str:
        """Which pool lacks nodes, and what is known about each node of it. Meaningful while not ready."""
        if not self._entries:
            return "no node is known"
        listed = {entry.listed_as for entry in self._entries.values()}
        lacking = [role for role in (*self._lacking(), ComputeRole.FUSED) if role in listed]
        details = "; ".join(
            f"{address}: {entry.detail}"
            for address, entry in self._entries.items()
            if not entry.is_usable and entry.listed_as in lacking
        )
        pools = " and no ".join(f"{role.value} node" for role in lacking)
        return f"no {pools} is usable ({details})"

    def _forget_summaries(self) -> None:
        self._usable.clear()
        self._adapters = None

    def _lacking(self) -> tuple[ComputeRole, ...]:
        lacking = [role for role in (ComputeRole.PREFILL, ComputeRole.DECODE) if not self.usable(role)]
        if any(node.facts.prefills_locally for node in self.usable(ComputeRole.DECODE)):
            return ()
        return tuple(lacking)

    def _fault_of(self, entry: _Entry, facts: NodeFacts) -> str | None:
        """Why the node must be left out, if so."""
        if facts.role is not entry.listed_as and (entry.listed_as, facts.role) != (
            ComputeRole.DECODE,
            ComputeRole.FUSED,
        ):
            return f"listed as {entry.listed_as.value} node, but says it is {facts}"
        if facts.vocab_size != self._vocab_size:
            return f"{facts}: vocab_size is {facts.vocab_size}, the router's tokenizer has {self._vocab_size}"
        others = {
            other.facts.model_fingerprint
            for address, other in self._entries.items()
            if address != facts.address and other.is_usable and other.facts is not None
        }
        if others and self._fingerprint in others and facts.model_fingerprint != self._fingerprint:
            return f"{facts}: model_fingerprint is {facts.model_fingerprint}, the pool runs {self._fingerprint}"
        return None

    def _change(self, address: str, state: NodeState, detail: str) -> None:
        entry = self._entries.get(address)
        if entry is None:
            return
        if (entry.state, entry.detail) == (state, detail):
            return
        self._forget_summaries()
        entry.state, entry.detail = state, detail
        if state is NodeState.READY:
            _log.info("%s is usable", entry.facts)
        else:
            # Whoever drains was told to: that is no cause for concern.
            level = logging.INFO if state is NodeState.DRAINING else logging.WARNING
            _log.log(level, "%s node at %s is left out: %s", entry.listed_as.value, address, detail)


def _reported_state(entry: _Entry) -> NodeState:
    return entry.state if entry.is_trusted else NodeState.SUSPECT
