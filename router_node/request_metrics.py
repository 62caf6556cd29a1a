"""What is measured of every request at the router: time to its first token, between tokens and in all, and its tokens.
The time to the first token is told to the trace and to the client as well.

Names and bounds are those of the OpenTelemetry semantic conventions for generative AI; `pdmesh.*` where they have none.
Source: opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from pdmesh.v1 import inference_pb2

from node_runtime.clock import Clock
from node_runtime.rpc import Metrics, Span, span_names

_DURATION_BOUNDS_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_BOUNDS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_TOKEN_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_CANCELLED: Final = "cancelled"
_MS_PER_S: Final = 1000.0


class RequestMetrics:
    """The instruments of one router."""

    def __init__(self, metrics: Metrics, clock: Clock, model_name: str) -> None:
        self.clock = clock
        self.model_name = model_name
        self.duration = metrics.histogram(
            "gen_ai.server.request.duration", "s", "from the request to its end", _DURATION_BOUNDS_S
        )
        self.time_to_first_token = metrics.histogram(
            "gen_ai.server.time_to_first_token", "s", "from the request to its first token", _FIRST_TOKEN_BOUNDS_S
        )
        self.time_per_output_token = metrics.histogram(
            "gen_ai.server.time_per_output_token", "s", "between tokens after the first one", _TOKEN_BOUNDS_S
        )
        self.tokens = metrics.counter("pdmesh.tokens", "{token}", "tokens of finished requests by direction")
        self.cached_tokens = metrics.counter(
            "pdmesh.cached_tokens", "{token}", "prompt tokens that were not computed, by where they came from"
        )

    @contextmanager
    def measuring(self, operation: str, span: Span) -> Iterator[RequestMeasurement]:
        """Measures the request inside the block, whose span it is; an exception that leaves the block becomes its
        `error.type`.
        """
        measurement = RequestMeasurement(self, operation, span)
        try:
            yield measurement
        except (asyncio.CancelledError, GeneratorExit):
            measurement.end(_CANCELLED)
            raise
        except BaseException as error:
            measurement.end(type(error).__name__)
            raise
        measurement.end("")


@dataclass(slots=True, kw_only=True)
class _Progress:
    """One sample: monotonic seconds, and the tokens that it has."""

    first_token_at_s: float
    last_token_at_s: float = 0.0
    num_tokens: int = 0


class RequestMeasurement:
    """One request, with all its samples."""

    def __init__(self, instruments: RequestMetrics, operation: str, span: Span) -> None:
        self._instruments = instruments
        self._span = span
        self._labels = {
            span_names.GEN_AI_OPERATION_NAME: operation,
            span_names.GEN_AI_PROVIDER_NAME: span_names.PROVIDER_PDMESH,
            span_names.GEN_AI_REQUEST_MODEL: instruments.model_name,
        }
        self._began_at_s = instruments.clock.now_s()
        self._progress: dict[int, _Progress] = {}

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        """Something the client is sent."""
        match response.WhichOneof("event"):
            case "delta":
                self._take_tokens(response.index, len(response.delta.tokens))
            case "finish":
                self._take_usage(response.finish.usage)

    def first_token_ms(self, index: int) -> float:
        """From the arrival of the request to the first token of that sample; 0 while it has none."""
        sample = self._progress.get(index)
        return 0.0 if sample is None else (sample.first_token_at_s - self._began_at_s) * _MS_PER_S

    def end(self, error_type: str) -> None:
        """The request is over; `error_type` is empty when it succeeded."""
        labels = {**self._labels, span_names.ERROR_TYPE: error_type} if error_type else self._labels
        instruments = self._instruments
        if error_type:
            # What it had got by then: a finish, which would tell, never came to some or all of its samples.
            num_tokens = sum(sample.num_tokens for sample in self._progress.values())
            self._span.set(span_names.GEN_AI_USAGE_OUTPUT_TOKENS, num_tokens)
        instruments.duration.record(instruments.clock.now_s() - self._began_at_s, labels)
        for sample in self._progress.values():
            if sample.num_tokens > 1:
                decoding_s = sample.last_token_at_s - sample.first_token_at_s
                instruments.time_per_output_token.record(decoding_s / (sample.num_tokens - 1), labels)

    def _take_tokens(self, index: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        instruments = self._instruments
        now_s = instruments.clock.now_s()
        is_first = not self._progress
        sample = self._progress.setdefault(index, _Progress(first_token_at_s=now_s))
        if is_first:
            instruments.time_to_first_token.record(now_s - self._began_at_s, self._labels)
            self._span.set(span_names.PDMESH_TIME_TO_FIRST_TOKEN_MS, self.first_token_ms(index))
        sample.last_token_at_s = now_s
        sample.num_tokens += num_tokens

    def _take_usage(self, usage: inference_pb2.Usage) -> None:
        instruments = self._instruments
        for direction, num_tokens in (("input", usage.prompt_tokens), ("output", usage.completion_tokens)):
            instruments.tokens.add(num_tokens, {"gen_ai.token.type": direction})
        cached = usage.cached
        for source, num_tokens in (
            ("prefill_device", cached.prefill_device),
            ("decode_device", cached.decode_device),
            ("host", cached.host),
            ("storage", cached.storage),
        ):
            instruments.cached_tokens.add(num_tokens, {"source": source})
