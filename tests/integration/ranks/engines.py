"""Fused engines of one or several rank processes, driven on the caller's thread."""

from __future__ import annotations

from pathlib import Path

from decode_node.config import FusedNodeConfig
from model_runtime.sampler import SampledToken, SamplingParams
from node_runtime.clock import ManualClock
from node_runtime.engine.core import ComputeCore
from node_runtime.engine.delivery import deliver_now
from node_runtime.engine.loop import EngineLoop
from node_runtime.engine.messages import StopRule, SubmitRequest, TokenGenerated, Update
from scheduler_core import RequestSpec

SETTINGS: dict[str, object] = {
    "memory": "1MiB",
    "prefix_granularity": 8,
    "kernel_page_size": 4,
    "token_budget": 16,
    "max_batch_size": 8,
    "num_threads": 1,
}


def config_of(model: Path, tensor_parallel: int) -> FusedNodeConfig:
    return FusedNodeConfig.model_validate({**SETTINGS, "model": str(model), "tensor_parallel": tensor_parallel})


class Engine:
    """An engine loop on the test's thread."""

    def __init__(self, core: ComputeCore) -> None:
        self.updates: dict[str, list[Update]] = {}
        self.loop = EngineLoop(
            core.scheduler,
            core.executor,
            group_ids=core.group_ids,
            clock=ManualClock(),
            deliver=deliver_now,
            on_fatal=lambda error: None,
        )

    def submit(self, request_id: str, prompt: list[int], num_tokens: int = 8) -> None:
        self.loop.post(
            SubmitRequest(
                spec=RequestSpec(request_id=request_id, tokens=prompt, max_new_tokens=num_tokens),
                sampling=SamplingParams(temperature=0.8, seed=3, num_logprobs=2),
                stop=StopRule(max_new_tokens=num_tokens),
                sink=self.updates.setdefault(request_id, []).append,
            )
        )

    def tokens(self) -> dict[str, list[SampledToken]]:
        return {
            request_id: [update.token for update in updates if isinstance(update, TokenGenerated)]
            for request_id, updates in self.updates.items()
        }
