"""One request of an engine while it may still get updates: how it is sampled, when it ends, and its text.

Owned by the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from model_runtime.request_text import RequestText
from node_runtime.engine.messages import EndReason, RequestSink, StopRule, SubmitRequest
from scheduler_core import RequestSpec

if TYPE_CHECKING:
    from model_runtime.sampler import SampledToken, SamplingParams
    from model_runtime.text.grammar import TokenMatcher


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """Made of a command; `spec` is what the scheduler is given."""

    spec: RequestSpec
    sampling: SamplingParams
    stop: StopRule | None
    sink: RequestSink
    # Says which tokens may follow.
    matcher: TokenMatcher | None = None
    num_generated: int = 0

    @classmethod
    def of(cls, command: SubmitRequest) -> LiveRequest:
        spec, sampling = command.spec, command.sampling
        if command.adapter is not None:
            sampling = replace(sampling, adapter=command.adapter)
        if sampling.needs_text:
            text = RequestText(spec.tokens, num_output_tokens=command.num_output_tokens)
            sampling = replace(sampling, text=text)
        if sampling.num_prompt_logprobs is not None:
            spec = _uncached(spec)
        return cls(spec=spec, sampling=sampling, stop=command.stop, sink=command.sink, matcher=command.matcher)

    def take(self, token_id: int) -> EndReason | None:
        """One more token was generated: the reason to end with it, if there is one."""
        self.num_generated += 1
        if self.sampling.text is not None:
            self.sampling.text.append(token_id)
        return None if self.stop is None else self.stop.find_end(token_id, self.num_generated)

    def prompt_logprobs(self) -> tuple[SampledToken, ...]:
        """For the first token; empty where they are not wanted, or a peer computed the prompt."""
        text = self.sampling.text
        if self.num_generated != 1 or text is None or self.sampling.num_prompt_logprobs is None:
            return ()
        return text.scores() if text.is_scored else ()


def _uncached(spec: RequestSpec) -> RequestSpec:
    """The same under a key of its own: nothing of it is in the cache, and so all of it is computed and has logits."""
    return RequestSpec(
        request_id=spec.request_id,
        tokens=spec.tokens,
        max_new_tokens=spec.max_new_tokens,
        extra_keys=[*spec.extra_keys, spec.request_id.encode()],
        local_prefill=spec.local_prefill,
    )
