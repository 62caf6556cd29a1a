"""What must hold of every answer that a client got: right text, true usage, and a status that is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from node_runtime.rpc.options import PEER_NOTICE_BOUND_S
from simulation.client import Answer, Sample
from simulation.compute_hosts import ComputeHost
from simulation.faults import FlipBit
from simulation.findings import Journal
from simulation.model import expected_tokens
from simulation.plane import DRAIN_BOUND_S
from simulation.scenario import ROUTER, Request, Scenario
from simulation.tenants import LIMITS

# With so much time no request of one sample may run out of it among its like while nothing is wrong.
_PATIENCE_S = 4.0
# Somebody else's trouble may keep blocks in quarantine for so long.
_QUARANTINE_S = PEER_NOTICE_BOUND_S + DRAIN_BOUND_S
# With so much time a request survives the loss of its nodes: it takes long to notice that one is gone, and meanwhile
# the blocks on the other one may be in quarantine.
_PLACED_ANEW_S = 25.0
_TROUBLE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")


class Judge:
    """Judges the answers of one run."""

    def __init__(self, scenario: Scenario, journal: Journal, compute: Mapping[str, ComputeHost]) -> None:
        self.scenario = scenario
        self.journal = journal
        self.compute = compute
        # Everything that clients have asked for.
        self.asked: list[Request] = []

    def judge(self, answer: Answer) -> None:
        """Looks at one request that has ended."""
        request, status = answer.request, answer.status
        name = request.request_id
        for index, sample in enumerate(answer.samples):
            self._judge_text(request, index, sample, has_all=status == "OK")
        if status == "OK":
            self._judge_usage(answer)
        elif status == "LEFT":
            pass
        elif status not in _TROUBLE and (status != "DATA_LOSS" or not self._is_damaged()):
            self.journal.find("status", f"{name} ends in {status}: {answer.message}")
        elif self._is_undisturbed(answer) and not self._is_excused(request, status):
            self.journal.find("status", f"{name} ends in {status} though its nodes are well: {answer.message}")
        elif self._has_refuge(request) and not self._is_excused(request, status):
            self.journal.find(
                "not placed anew", f"{name} ends in {status} though other nodes are well: {answer.message}"
            )
        elif self._is_promised(answer) and not self._is_excused(request, status):
            self.journal.find(
                "broken promise", f"{name} ends in {status} though one node left at a time: {answer.message}"
            )

    def _judge_text(self, request: Request, index: int, sample: Sample, *, has_all: bool) -> None:
        num_tokens = len(sample.token_ids)
        expected = self._expected(request, index, num_tokens)
        name = request.request_id if request.num_samples == 1 else f"sample {index} of {request.request_id}"
        if sample.token_ids != expected:
            self.journal.find("wrong text", f"{name} got {sample.token_ids}, right is {expected}")
        if has_all and num_tokens != request.max_tokens:
            self.journal.find("short text", f"{name} got {num_tokens} of {request.max_tokens} tokens and an OK")

    def _expected(self, request: Request, index: int, num_tokens: int) -> list[int]:
        """The first tokens of one answer."""
        return expected_tokens(self.scenario.kind, request.prompt, num_tokens, request.seed + index)

    def _is_damaged(self) -> bool:
        return any(isinstance(fault, FlipBit) for fault in self.scenario.faults)

    def _is_undisturbed(self, answer: Answer) -> bool:
        """Whether no fault concerned the nodes of a request: what happens to others must not end it."""
        if not self.scenario.faults:
            return True
        nodes = answer.placed_on
        return bool(nodes) and not nodes & self.scenario.touched and ROUTER not in self.scenario.touched

    def _has_refuge(self, request: Request) -> bool:
        """Whether some pair of nodes was well all the time, and there was time to go there."""
        touched = self.scenario.touched
        prefill, decode, fused = (
            [name for name in names if name not in touched] for names in self._names_that_fit(request)
        )
        has_nodes = bool(fused or (prefill and decode))
        return has_nodes and ROUTER not in touched and request.timeout_s >= _PLACED_ANEW_S

    def _is_promised(self, answer: Answer) -> bool:
        """Whether nodes were told to leave, one at a time, and there were others for the request all the while; of a
        router that leaves, whether it had taken the request.
        """
        scenario, request = self.scenario, answer.request
        if not scenario.is_only_drained or request.timeout_s < _PLACED_ANEW_S:
            return False
        if ROUTER in scenario.touched:
            return bool(answer.placed_on)
        prefill, decode, fused = self._names_that_fit(request)
        return len(fused) > 1 or (len(prefill) > 1 and len(decode) > 1) or bool(fused and prefill and decode)

    def _names_that_fit(self, request: Request) -> tuple[list[str], list[str], list[str]]:
        """Prefill, decode and fused nodes that are large enough for a request."""
        scenario, num_tokens = self.scenario, len(request.prompt) + request.max_tokens

        def fitting(names: Sequence[str]) -> list[str]:
            return [name for name in names if num_tokens <= self.compute[name].max_request_tokens]

        # A prompt that goes on elsewhere has grown by what was generated, so prefill nodes must hold all of it, too.
        return fitting(scenario.prefill_names), fitting(scenario.decode_names), fitting(scenario.fused_names)

    def _is_excused(self, request: Request, status: str) -> bool:
        """Whether a request may fail on nodes that are well: it has little time, or it fits nowhere."""
        if status == "DEADLINE_EXCEEDED":
            # Whoever is in line behind samples waits for all of them, where memory is for one at a time.
            patience_s = _PATIENCE_S * max(other.num_samples for other in self.asked)
            return request.timeout_s < patience_s + (_QUARANTINE_S if self.scenario.faults else 0.0)
        if status == "RESOURCE_EXHAUSTED" and request.tenant in LIMITS:
            # Whether it had reached its limit is seen on the network.
            return True
        _, decode, fused = self._names_that_fit(request)
        return status == "RESOURCE_EXHAUSTED" and not decode and not fused

    def _judge_usage(self, answer: Answer) -> None:
        """The prompt and what of it was cached are counted once, with the first answer."""
        request = answer.request
        for index, sample in enumerate(answer.samples):
            if sample.finish is None:
                continue
            if sample.finish.num_replacements:
                self.journal.count("placed anew")
            usage = sample.finish.usage
            cached = usage.cached
            num_cached = cached.prefill_device + cached.decode_device + cached.host + cached.storage
            if (
                usage.prompt_tokens != (0 if index else len(request.prompt))
                or usage.completion_tokens != len(sample.token_ids)
                or num_cached > (0 if index else len(request.prompt) - 1)
            ):
                text = f"sample {index} of {request.request_id}: {usage}"
                self.journal.find("usage", text.replace("\n", " "))
            elif num_cached and not sample.finish.num_replacements and self._is_undisturbed(answer):
                self._judge_cached(request, num_cached)

    def _judge_cached(self, request: Request, num_cached: int) -> None:
        """Nothing is found in a cache but what was computed for somebody else."""
        others = [other for other in self.asked if other is not request and other.tenant == request.tenant]
        if any(_common(request.prompt, other.prompt) >= num_cached for other in others):
            return
        for other in others:
            texts = (self._expected(other, index, other.max_tokens) for index in range(other.num_samples))
            if any(_common(request.prompt, (*other.prompt, *text)) >= num_cached for text in texts):
                return
        text = f"{request.request_id} found {num_cached} tokens of its prompt cached, which nobody else had asked for"
        self.journal.find("usage", text)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    num_tokens = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        num_tokens += 1
    return num_tokens
