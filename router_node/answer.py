"""What the client of one request has been sent so far, over all the attempts that it took.

Whatever node the next tokens come from, they go on here: the text, the counts and the timings know no seam. Without
I/O and clock. Belongs to one request.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.v1 import decode_pb2, inference_pb2

from model_runtime.text.tokenizer import Tokenizer
from node_runtime.request_rules import MAX_REQUEST_ID_BYTES
from router_node.request_preparation import PreparedRequest
from router_node.text_stream import TextStream

_MS_PER_S = 1000.0
STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH


class Answer:
    """Begin each attempt, feed what its decode node sends, then ask for the finish."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._text = TextStream(tokenizer, stop=prepared.stop, stop_token_ids=prepared.message.stop_token_ids)
        self._stop_token_ids = frozenset(prepared.message.stop_token_ids)
        self._token_ids: list[int] = []
        self._num_attempts = 0
        self._num_hedges = 0
        self._is_admitted = False
        self._has_prompt_logprobs = False
        self._cached: inference_pb2.CachedTokens | None = None
        self._timings = inference_pb2.Timings()
        self._first_tokens_at_s: float | None = None
        self._last_tokens_at_s = 0.0
        self._reported: decode_pb2.DecodeFinish | None = None

    @property
    def num_attempts(self) -> int:
        """Calls to decode nodes so far, hedges included."""
        return self._num_attempts

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def max_tokens_left(self) -> int:
        return self._prepared.message.max_tokens - len(self._token_ids)

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._text.matched_stop

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow, whatever the decode node may yet say."""
        ends_in_stop_token = bool(self._token_ids) and self._token_ids[-1] in self._stop_token_ids
        has_ended = self._reported is not None or self.matched_stop is not None
        return has_ended or ends_in_stop_token or self.max_tokens_left <= 0

    def request(self, prefill_address: str) -> decode_pb2.DecodeRequest:
        """What to ask the next decode node: the prompt, and behind it what the client has already got."""
        message = self._prepared.addressed(prefill_address).message
        message.request_id = _attempt_name(message.request_id, self._prepared.sample, self._num_attempts + 1)
        message.token_ids.extend(self._token_ids)
        message.num_output_tokens = len(self._token_ids)
        message.max_tokens = self.max_tokens_left
        if self._has_prompt_logprobs:
            message.ClearField("num_prompt_logprobs")
        return message

    def begin_attempt(self) -> None:
        """The request is sent to a decode node."""
        self._num_attempts += 1
        self._is_admitted = False

    def begin_hedge(self) -> None:
        """The request is sent to a second decode node beside the first one."""
        self._num_attempts += 1
        self._num_hedges += 1

    def take_admitted(self, admitted: decode_pb2.DecodeAdmitted) -> inference_pb2.PromptLogprobs | None:
        """What the client is told of its prompt, if it asked and does not know by now. Raises ValueError when the node
        does not do what was asked of it.
        """
        if self._prepared.message.sampling.HasField("structured_output") and not admitted.output_is_structured:
            raise ValueError("the node knows no sampling.structured_output")
        self._is_admitted = True
        self._note_outcome(admitted.cached, admitted.timings)
        prompt = self._prepared.message
        if not prompt.HasField("num_prompt_logprobs") or self._has_prompt_logprobs:
            return None
        if len(admitted.prompt_logprobs) != len(prompt.token_ids) - 1:
            raise ValueError(
                f"log-probabilities of {len(admitted.prompt_logprobs)} prompt tokens came, {len(prompt.token_ids) - 1} "
                "were asked for"
            )
        self._has_prompt_logprobs = True
        first = inference_pb2.SampledToken(token_id=prompt.token_ids[0])
        return inference_pb2.PromptLogprobs(tokens=[first, *admitted.prompt_logprobs])

    def take_tokens(self, tokens: Iterable[inference_pb2.SampledToken], now_s: float) -> inference_pb2.Delta:
        """What the client may see of these. Raises ValueError for a token outside the vocabulary, and where the prompt
        should have been told of before.
        """
        if self._prepared.message.HasField("num_prompt_logprobs") and not self._has_prompt_logprobs:
            raise ValueError("tokens came before the log-probabilities of the prompt that were asked for")
        delta = self._text.push(tokens)
        self._token_ids.extend(token.token_id for token in delta.tokens)
        self._last_tokens_at_s = now_s
        if self._first_tokens_at_s is None:
            self._first_tokens_at_s = now_s
        return delta

    def take_finish(self, finish: decode_pb2.DecodeFinish) -> None:
        self._reported = finish
        if not self._is_admitted:
            # A decode node of an older release says so only now.
            self._note_outcome(finish.usage.cached, finish.timings)

    def rest(self) -> str:
        """Text that was held back, once no token follows; it may yet complete a stop string."""
        return "" if self.matched_stop is not None else self._text.finish()

    def finish(self) -> inference_pb2.Finish:
        """The end of the stream; requires `is_complete`, and `rest` to have been asked for.

        Whoever knows when the request came adds the time to its first token.
        """
        reported = self._reported
        if reported is not None and self._num_attempts == 1:
            finish = inference_pb2.Finish(usage=reported.usage, timings=reported.timings)
        else:
            finish = self._own_finish()
        finish.num_replacements = self._num_attempts - 1 - self._num_hedges
        self._set_reason(finish)
        return finish

    def _set_reason(self, finish: inference_pb2.Finish) -> None:
        if self.matched_stop is not None:
            finish.reason = STOP
            finish.matched_stop = self.matched_stop
        elif self._reported is not None:
            finish.reason = self._reported.reason
            if self._reported.HasField("matched_token_id"):
                finish.matched_token_id = self._reported.matched_token_id
        elif self._token_ids and self._token_ids[-1] in self._stop_token_ids:
            finish.reason = STOP
            finish.matched_token_id = self._token_ids[-1]
        else:
            finish.reason = LENGTH

    def _own_finish(self) -> inference_pb2.Finish:
        """From what passed through here: no single decode node saw all of it, or the one that did was cancelled.

        Without an admission (a decode node of an older release) `cached` stays absent because it is not known.
        """
        usage = inference_pb2.Usage(
            prompt_tokens=self._prepared.prompt_tokens, completion_tokens=self.num_tokens, cached=self._cached
        )
        timings = inference_pb2.Timings()
        timings.CopyFrom(self._timings)
        if self._first_tokens_at_s is not None:
            timings.decode_ms = (self._last_tokens_at_s - self._first_tokens_at_s) * _MS_PER_S
        return inference_pb2.Finish(usage=usage, timings=timings)

    def _note_outcome(self, cached: inference_pb2.CachedTokens, timings: inference_pb2.Timings) -> None:
        """What one attempt had cached and how long it took. Later attempts find what earlier ones computed, and that
        was computed for this request: only the first to be admitted tells what was not.
        """
        if self._cached is None:
            self._cached = inference_pb2.CachedTokens()
            self._cached.CopyFrom(cached)
        total = self._timings
        total.prefill_queue_ms += timings.prefill_queue_ms
        total.prefill_compute_ms += timings.prefill_compute_ms
        total.transfer_ms += timings.transfer_ms
        total.transfer_exposed_ms += timings.transfer_exposed_ms
        total.transferred_bytes += timings.transferred_bytes
        total.transferred_runs += timings.transferred_runs
        total.transferred_blocks += timings.transferred_blocks


def _attempt_name(request_id: str, sample: int, attempt: int) -> str:
    """A name of its own for each further sample, which may run beside the others on one node, and for each further
    attempt: nodes of the last one may not have noticed yet that it is over.
    """
    suffix = (f"+{sample}" if sample else "") + (f"~{attempt}" if attempt > 1 else "")
    return request_id.encode()[: MAX_REQUEST_ID_BYTES - len(suffix)].decode(errors="ignore") + suffix
