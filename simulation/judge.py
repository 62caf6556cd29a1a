"""What must hold of every answer that a client got: right text, true usage, and a status that is allowed."""

from __future__ import annotations

from collections.abc import Mapping

from node_runtime.rpc.options import PEER_NOTICE_BOUND_S
from simulation.client import Answer
from simulation.compute_hosts import ComputeHost
from simulation.findings import Journal
from simulation.model import expected_tokens
from simulation.plane import DRAIN_BOUND_S
from simulation.scenario import FlipBit, Request, Scenario

# With so much time no request may run out of it while nothing is wrong.
_PATIENCE_S = 4.0
# Somebody else's trouble may keep blocks in quarantine for so long.
_QUARANTINE_S = PEER_NOTICE_BOUND_S + DRAIN_BOUND_S + _PATIENCE_S
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

    def judge(self, answer: Answer) -> None:
        """Looks at one request that has ended."""
        request, status = answer.request, answer.status
        expected = expected_tokens(self.scenario.kind, request.prompt, request.max_tokens, request.seed)
        name = request.request_id
        if answer.token_ids != expected[: len(answer.token_ids)]:
            self.journal.find("wrong text", f"{name} got {answer.token_ids}, right is {expected}")
        if status == "OK":
            if len(answer.token_ids) != len(expected):
                self.journal.find(
                    "short text", f"{name} got {len(answer.token_ids)} of {len(expected)} tokens and an OK"
                )
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

    def _is_damaged(self) -> bool:
        return any(isinstance(fault, FlipBit) for fault in self.scenario.faults)

    def _is_undisturbed(self, answer: Answer) -> bool:
        """Whether no fault concerned the nodes of a request: what happens to others must not end it."""
        if not self.scenario.faults:
            return True
        nodes = {name for placement in answer.placements for name in placement}
        return bool(nodes) and not nodes & self.scenario.touched and "router" not in self.scenario.touched

    def _has_refuge(self, request: Request) -> bool:
        """Whether some pair of nodes was well all the time, and there was time to go there."""
        touched, num_tokens = self.scenario.touched, len(request.prompt) + request.max_tokens
        prefill = [name for name in self.scenario.prefill_names if name not in touched]
        decode = [
            name
            for name in self.scenario.decode_names
            if name not in touched and num_tokens <= self.compute[name].max_request_tokens
        ]
        return bool(prefill and decode) and "router" not in touched and request.timeout_s >= _PLACED_ANEW_S

    def _is_excused(self, request: Request, status: str) -> bool:
        """Whether a request may fail on nodes that are well: it has little time, or it fits nowhere."""
        if status == "DEADLINE_EXCEEDED":
            return request.timeout_s < (_PATIENCE_S if not self.scenario.faults else _QUARANTINE_S)
        num_tokens = len(request.prompt) + request.max_tokens
        decode = (self.compute[name].max_request_tokens for name in self.scenario.decode_names)
        return status == "RESOURCE_EXHAUSTED" and num_tokens > max(decode)

    def _judge_usage(self, answer: Answer) -> None:
        if answer.finish is None:
            return
        usage, request = answer.finish.usage, answer.request
        cached = usage.cached
        num_cached = cached.prefill_device + cached.decode_device + cached.host + cached.storage
        if (
            usage.prompt_tokens != len(request.prompt)
            or usage.completion_tokens != len(answer.token_ids)
            or num_cached >= len(request.prompt)
        ):
            self.journal.find("usage", f"{request.request_id}: {usage}".replace("\n", " "))
