"""A simulated mesh: the router's own placement in front of simulated nodes, in virtual time.

Nodes tell the router what they have cached and how they are as often as real ones do. A request is routed when it
arrives; on a pair it runs as in production: the decode node grants memory when the prefill node has admitted the
prompt, the cache moves while later tokens are computed, one transfer of a prefill node after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from pdmesh.v1 import inference_pb2

import scheduler_core as sc
from placement.costs import Machine
from placement.nodes import Agenda, Served, SimulatedNode, Watcher, make_scheduler
from placement.trace import BLOCK_TOKENS, TracedRequest
from router_node.node_follower import report_of
from router_node.node_pool import ComputeRole, NodeFacts, NodePool, TokenLimits
from router_node.observations import Observations
from router_node.placement import Occupation, PlacementChoice, Placer
from router_node.placement_policy import PolicyName
from router_node.prompt_prefixes import PromptPrefixes

FOLLOW_INTERVAL_S = 0.25
MAX_KEYS_PER_NODE = 65_536
_ROLES = {sc.Role.PREFILL: ComputeRole.PREFILL, sc.Role.DECODE: ComputeRole.DECODE, sc.Role.FUSED: ComputeRole.FUSED}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """How many nodes of each role, and what each of them has."""

    num_prefill: int = 0
    num_decode: int = 0
    num_fused: int = 0
    node_blocks: int
    prefill_token_budget: int = 8192
    # Of a fused node, whose streams wait for the whole pass.
    fused_token_budget: int = 2048
    max_batch_size: int = 256
    machine: Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trace did on a mesh. Seconds; shares are between 0 and 1."""

    first_token_s: Sequence[float]
    # Mean time per token behind the first, of each request with more than one.
    token_gap_s: Sequence[float]
    hit_share: float
    # Busy seconds of the busiest node that computes prompts, over the mean of them.
    imbalance: float
    # Of the nodes that compute prompts.
    busy_share: float


class SimulatedMesh(Watcher):
    """Runs one trace once."""

    def __init__(self, shape: MeshShape, policy: PolicyName) -> None:
        self.agenda = Agenda()
        self._machine = shape.machine
        self._nodes: dict[str, SimulatedNode] = {}
        for role, count in (
            (sc.Role.PREFILL, shape.num_prefill),
            (sc.Role.DECODE, shape.num_decode),
            (sc.Role.FUSED, shape.num_fused),
        ):
            for number in range(count):
                self._add_node(shape, role, number)
        listed = {
            wire_role: [name for name, node in self._nodes.items() if node.role is role]
            for role, wire_role in _ROLES.items()
        }
        self._pool = NodePool(listed, vocab_size=1)
        self._observations = Observations(max_keys_per_node=MAX_KEYS_PER_NODE)
        self._placer = Placer(self._pool, policy=policy, observations=self._observations, clock=self.agenda)
        self._capacity_tokens = shape.node_blocks * BLOCK_TOKENS
        for node in self._nodes.values():
            self._pool.record_answer(self._facts(node), is_serving=True)
        self._requests: dict[str, Served] = {}
        self._occupations: dict[str, tuple[AbstractContextManager[Occupation], Occupation]] = {}
        self._num_left = 0

    def run(self, trace: Sequence[TracedRequest]) -> Outcome:
        """Until every request of the trace has its last token."""
        self._num_left = len(trace)
        for number, traced in enumerate(trace):
            self.agenda.at(traced.arrival_s, partial(self._arrive, str(number), traced))
        self.agenda.after(FOLLOW_INTERVAL_S, self._follow)
        self.agenda.run(lambda: self._num_left == 0)
        if self._num_left:
            raise RuntimeError(f"{self._num_left} requests never ended")
        return self._outcome()

    # One request.

    def _arrive(self, name: str, traced: TracedRequest) -> None:
        tokens = traced.tokens()
        request = self._requests[name] = Served(
            name=name,
            tokens=tokens,
            prompt_tokens=traced.prompt_tokens,
            output_tokens=traced.output_tokens,
            arrival_s=self.agenda.now_s(),
            result=sc.ResultEvent(name, [1]),
        )
        choice = self._placer.choose(
            prompt_tokens=traced.prompt_tokens,
            max_tokens=traced.output_tokens,
            prefixes=PromptPrefixes(tokens.tolist(), ()),
        )
        self._occupy(request, choice)
        decode = self._nodes[choice.decode.address]
        request.decode = decode
        self.agenda.after(self._machine.message_s, lambda: decode.submit(request, max_new_tokens=request.output_tokens))
        if choice.prefill is not None:
            prefill = request.prefill = self._nodes[choice.prefill.address]
            self.agenda.after(2 * self._machine.message_s, lambda: prefill.submit(request, max_new_tokens=1))

    def _occupy(self, request: Served, choice: PlacementChoice) -> None:
        manager = self._placer.occupied(choice)
        self._occupations[request.name] = manager, manager.__enter__()

    def on_admitted(self, node: SimulatedNode, request_id: str, hit_tokens: int) -> None:
        request = self._requests[request_id]
        if node.role is sc.Role.DECODE:
            return
        if request.started_at_s == 0.0:
            request.prefill_hit_tokens = hit_tokens
            request.started_at_s = self.agenda.now_s()
        decode = request.decode
        if node.role is sc.Role.PREFILL and decode is not None:
            self.agenda.after(self._machine.message_s, lambda: decode.tell(sc.ReadyEvent(request_id)))

    def on_granted(self, node: SimulatedNode, request_id: str, from_token: int) -> None:
        request = self._requests[request_id]
        prefill = request.prefill
        if prefill is None or request.granted_at_s is not None:
            return
        request.from_token = from_token

        def arrive() -> None:
            request.granted_at_s = self.agenda.now_s()
            prefill.tell(sc.GrantedEvent(request_id))
            self._finish_transfer(request)

        self.agenda.after(self._machine.message_s, arrive)

    def on_handover(self, node: SimulatedNode, request_id: str) -> None:
        request = self._requests[request_id]
        request.computed_at_s = self.agenda.now_s()
        self._finish_transfer(request)

    def _finish_transfer(self, request: Served) -> None:
        """Once the prompt is computed and the memory granted: when will the last byte be there?"""
        prefill, decode = request.prefill, request.decode
        if prefill is None or decode is None or request.computed_at_s is None or request.granted_at_s is None:
            return
        transfer_s = self._machine.transfer_s(request.prompt_tokens - request.from_token)
        begin_s = max(request.granted_at_s, request.started_at_s, prefill.link_free_at_s)
        end_s = max(request.computed_at_s, begin_s + transfer_s)
        prefill.link_free_at_s = begin_s + transfer_s
        timings = inference_pb2.Timings(
            transfer_ms=max(1e-6, transfer_s) * 1000,
            transferred_bytes=(request.prompt_tokens - request.from_token) * self._machine.cache_bytes_per_token,
        )

        def land() -> None:
            _, occupation = self._occupations[request.name]
            occupation.end_prefill(
                prompt_tokens=request.prompt_tokens,
                cached=inference_pb2.CachedTokens(decode_device=request.from_token),
                timings=timings,
            )
            prefill.tell(sc.HandedOverEvent(request.name))
            is_last = self._count_token(request)
            decode.tell(sc.DoneEvent(request.name, 1))
            if is_last:
                decode.tell(sc.FinishEvent(request.name))

        self.agenda.at(end_s + self._machine.message_s, land)

    def on_token(self, node: SimulatedNode, request_id: str) -> bool:
        request = self._requests[request_id]
        if request.num_generated == 0:
            self._occupations[request_id][1].end_prefill()
        return self._count_token(request)

    def _count_token(self, request: Served) -> bool:
        """One more token is there; whether it was the last."""
        request.num_generated += 1
        if request.num_generated == 1:
            request.first_token_at_s = self.agenda.now_s()
        if request.num_generated < request.output_tokens:
            return False
        request.ended_at_s = self.agenda.now_s()
        self._num_left -= 1
        manager, _ = self._occupations.pop(request.name)
        manager.__exit__(None, None, None)
        return True

    # The router's knowledge.

    def _follow(self) -> None:
        for name, node in self._nodes.items():
            self._observations.take_report(name, report_of(node.status(), self._capacity_tokens))
            _, sequence = self._observations.index.position(name)
            for change in node.feed.changes_since(sequence):
                self._observations.index.apply(name, 1, change)
        self.agenda.after(FOLLOW_INTERVAL_S, self._follow)

    def _add_node(self, shape: MeshShape, role: sc.Role, number: int) -> None:
        name = f"{role.name.lower()}-{number}"
        self._nodes[name] = SimulatedNode(
            name=name,
            role=role,
            machine=shape.machine,
            agenda=self.agenda,
            watcher=self,
            num_lcm_blocks=shape.node_blocks,
            token_budget=shape.fused_token_budget if role is sc.Role.FUSED else shape.prefill_token_budget,
            max_batch_size=shape.max_batch_size,
        )

    def _facts(self, node: SimulatedNode) -> NodeFacts:
        limit = node.scheduler.max_request_tokens
        return NodeFacts(
            address=node.name,
            node_id=node.name,
            incarnation=1,
            role=_ROLES[node.role],
            model_fingerprint="simulated",
            vocab_size=1,
            limits=TokenLimits(context_tokens=limit, max_request_tokens=limit),
            prefix_granularity=BLOCK_TOKENS,
            capacity_tokens=self._capacity_tokens,
        )

    def _outcome(self) -> Outcome:
        requests = self._requests.values()
        computing = [node for node in self._nodes.values() if node.role is not sc.Role.DECODE]
        busy = [node.busy_s for node in computing]
        mean_busy_s = sum(busy) / len(busy)
        return Outcome(
            first_token_s=[request.first_token_at_s - request.arrival_s for request in requests],
            token_gap_s=[
                (request.ended_at_s - request.first_token_at_s) / (request.num_generated - 1)
                for request in requests
                if request.num_generated > 1
            ],
            hit_share=sum(request.prefill_hit_tokens for request in requests)
            / sum(request.prompt_tokens for request in requests),
            imbalance=max(busy) / mean_busy_s,
            busy_share=mean_busy_s / self.agenda.now_s(),
        )


def single_cache_hit_share(trace: Sequence[TracedRequest], cache_blocks: int) -> float:
    """What one cache of the whole size would hit: every prompt behind the one before it, with immediate results."""
    scheduler = make_scheduler(sc.Role.FUSED, cache_blocks, token_budget=2**30)
    num_hit_tokens = 0
    for number, traced in enumerate(trace):
        name = str(number)
        scheduler.submit([sc.RequestSpec(request_id=name, tokens=traced.tokens(), max_new_tokens=1)])
        (admission,) = scheduler.next_plan().admissions
        num_hit_tokens += admission.device_hit_tokens
        scheduler.advance([sc.ResultEvent(name, [1]), sc.FinishEvent(name)])
    return num_hit_tokens / sum(traced.prompt_tokens for traced in trace)
