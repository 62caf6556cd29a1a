"""What one sample of a gateway's request has so far, as messages of its protocol. Pure, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pdmesh.v1 import decode_pb2, inference_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2

from decode_node.engine_protocol.requests import EngineRequest
from model_runtime.text.detokenizer import IncrementalDetokenizer
from model_runtime.text.stop_strings import StopStringMatcher
from model_runtime.text.tokenizer import Tokenizer

_REASONS: Final[Mapping[int, str]] = MappingProxyType(
    {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}
)


class SampleAnswer:
    """Feed it tokens until `matched_stop` is set or the generation ends; then nothing may be pushed any more."""

    def __init__(self, request: EngineRequest, index: int, tokenizer: Tokenizer) -> None:
        self._request = request
        self._index = index
        sample = request.samples[index]
        self._num_prompt_tokens = len(sample.token_ids)
        self._has_logprobs = sample.HasField("num_logprobs")
        self._stop_token_ids = frozenset(sample.stop_token_ids)
        # Text is looked at for the sake of stop strings alone.
        self._detokenizer = IncrementalDetokenizer(tokenizer) if request.stop else None
        self._matcher = StopStringMatcher(request.stop)
        self._tokens: list[inference_pb2.SampledToken] = []
        self._num_tokens = 0
        # Of the whole request: what later samples find was computed for the first one.
        self.num_cached_tokens = 0
        self.matched_stop: str | None = None

    def push(self, tokens: Iterable[inference_pb2.SampledToken]) -> tokenspeed_scheduler_pb2.GenerateResponse:
        """The chunk of these tokens. Those behind the one that completes a stop string are dropped."""
        shown: list[inference_pb2.SampledToken] = []
        for token in tokens:
            self._num_tokens += 1
            if token.token_id in self._stop_token_ids:
                if self._request.keeps_stop_token:
                    shown.append(token)
                continue
            shown.append(token)
            self.matched_stop = self._match(token.token_id)
            if self.matched_stop is not None:
                break
        self._tokens += shown
        return tokenspeed_scheduler_pb2.GenerateResponse(
            request_id=self._request.request_id,
            chunk=tokenspeed_scheduler_pb2.GenerateStreamChunk(
                token_ids=[token.token_id for token in shown],
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=self._num_tokens,
                cached_tokens=self.num_cached_tokens,
                output_logprobs=self._logprobs(shown),
                index=self._index,
            ),
        )

    def complete(self, finish: decode_pb2.DecodeFinish | None) -> tokenspeed_scheduler_pb2.GenerateResponse:
        """The last message: all tokens, and why there are no more. Without `finish` a stop string ended the sample."""
        matched_token_id = None
        reason = "stop"
        if finish is not None and self.matched_stop is None:
            reason = _REASONS[finish.reason]
            matched_token_id = finish.matched_token_id if finish.HasField("matched_token_id") else None
        complete = tokenspeed_scheduler_pb2.GenerateComplete(
            output_ids=[token.token_id for token in self._tokens],
            finish_reason=reason,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_tokens,
            cached_tokens=self.num_cached_tokens,
            # Who was sent chunks has them.
            output_logprobs=None if self._request.is_streamed else self._logprobs(self._tokens),
            matched_token_id=matched_token_id,
            matched_stop_str=self.matched_stop,
            index=self._index,
        )
        return tokenspeed_scheduler_pb2.GenerateResponse(request_id=self._request.request_id, complete=complete)

    def _match(self, token_id: int) -> str | None:
        if self._detokenizer is None:
            return None
        return self._matcher.push(self._detokenizer.push((token_id,))).matched

    def _logprobs(self, tokens: Sequence[inference_pb2.SampledToken]) -> tokenspeed_scheduler_pb2.OutputLogProbs | None:
        if not self._has_logprobs or not tokens:
            return None
        return tokenspeed_scheduler_pb2.OutputLogProbs(
            token_logprobs=[token.logprob for token in tokens],
            token_ids=[token.token_id for token in tokens],
            top_logprobs=[
                tokenspeed_scheduler_pb2.TopLogProbs(
                    values=[item.logprob for item in token.top_logprobs],
                    token_ids=[item.token_id for item in token.top_logprobs],
                )
                for token in tokens
            ],
        )
