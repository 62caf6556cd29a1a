"""What the Inference service answers, in the objects of the OpenAI API: whole, or as the chunks of a stream.

Without I/O and clock. One object per request. Logarithms, counts and reasons are the service's own; here they only
change their names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pdmesh.v1 import inference_pb2

from model_runtime.text.tokenizer import Tokenizer

JsonObject = dict[str, object]

_FINISH_REASONS: Mapping[int, str] = MappingProxyType(
    {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}
)
_INDEX: Final = 0
_IMPOSSIBLE: Final = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What all objects of one answer begin with. `created_s` is seconds since the Unix epoch."""

    request_id: str
    model: str
    created_s: int
    with_logprobs: bool
    with_usage_in_stream: bool


class AnswerShape(ABC):
    """The objects of one answer, in the order in which a stream sends them; or `whole`."""

    whole_object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer

    @abstractmethod
    def opening(self) -> Sequence[JsonObject]:
        """Chunks before any text."""

    @abstractmethod
    def chunk(self, delta: inference_pb2.Delta) -> JsonObject | None:
        """The chunk that shows this; None when there is nothing to show yet."""

    @abstractmethod
    def whole(self, deltas: Sequence[inference_pb2.Delta], finish: inference_pb2.Finish) -> JsonObject:
        """The one object that an answer without streaming is."""

    @abstractmethod
    def _last_choice(self, reason: str) -> JsonObject: ...

    def closing(self, finish: inference_pb2.Finish) -> Sequence[JsonObject]:
        """Chunks behind all text."""
        chunks = [self._object(self.chunk_object, [self._last_choice(_reason(finish))])]
        if self._head.with_usage_in_stream:
            chunks.append({**self._object(self.chunk_object, []), "usage": _usage(finish.usage)})
        return chunks

    def _object(self, kind: str, choices: Sequence[JsonObject]) -> JsonObject:
        head = self._head
        made: JsonObject = {
            "id": f"{self.id_prefix}-{head.request_id}",
            "object": kind,
            "created": head.created_s,
            "model": head.model,
            "choices": choices,
        }
        if kind == self.chunk_object and head.with_usage_in_stream:
            made["usage"] = None
        return made

    def _whole(self, choice: JsonObject, finish: inference_pb2.Finish) -> JsonObject:
        return {**self._object(self.whole_object, [choice]), "usage": _usage(finish.usage)}

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


class ChatAnswer(AnswerShape):
    """Objects of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def opening(self) -> Sequence[JsonObject]:
        return [self._chunk({"role": "assistant", "content": ""}, None)]

    def chunk(self, delta: inference_pb2.Delta) -> JsonObject | None:
        logprobs = self._logprobs(delta.tokens) if self._head.with_logprobs else None
        if not delta.text and not (logprobs and delta.tokens):
            return None
        return self._chunk({"content": delta.text}, logprobs)

    def whole(self, deltas: Sequence[inference_pb2.Delta], finish: inference_pb2.Finish) -> JsonObject:
        tokens = [token for delta in deltas for token in delta.tokens]
        choice: JsonObject = {
            "index": _INDEX,
            "message": {
                "role": "assistant",
                "content": "".join(delta.text for delta in deltas),
                "refusal": None,
            },
            "logprobs": self._logprobs(tokens) if self._head.with_logprobs else None,
            "finish_reason": _reason(finish),
        }
        return self._whole(choice, finish)

    def _last_choice(self, reason: str) -> JsonObject:
        return {"index": _INDEX, "delta": {}, "logprobs": None, "finish_reason": reason}

    def _chunk(self, shown: JsonObject, logprobs: JsonObject | None) -> JsonObject:
        choice: JsonObject = {"index": _INDEX, "delta": shown, "logprobs": logprobs, "finish_reason": None}
        return self._object(self.chunk_object, [choice])

    def _logprobs(self, tokens: Iterable[inference_pb2.SampledToken]) -> JsonObject:
        content = [
            {
                **self._entry(token.token_id, token.logprob),
                "top_logprobs": [self._entry(each.token_id, each.logprob) for each in token.top_logprobs],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> JsonObject:
        return {
            "token": self._token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


class CompletionAnswer(AnswerShape):
    """Objects of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        super().__init__(head, tokenizer)
        # Characters of the completion in front of the next token, as its tokens spell it one by one.
        self._num_characters = 0

    def opening(self) -> Sequence[JsonObject]:
        return ()

    def chunk(self, delta: inference_pb2.Delta) -> JsonObject | None:
        logprobs = self._logprobs(delta.tokens) if self._head.with_logprobs else None
        if not delta.text and not (logprobs and delta.tokens):
            return None
        return self._object(self.chunk_object, [_completion_choice(delta.text, logprobs, None)])

    def whole(self, deltas: Sequence[inference_pb2.Delta], finish: inference_pb2.Finish) -> JsonObject:
        tokens = [token for delta in deltas for token in delta.tokens]
        logprobs = self._logprobs(tokens) if self._head.with_logprobs else None
        text = "".join(delta.text for delta in deltas)
        return self._whole(_completion_choice(text, logprobs, _reason(finish)), finish)

    def _last_choice(self, reason: str) -> JsonObject:
        return _completion_choice("", None, reason)

    def _logprobs(self, tokens: Iterable[inference_pb2.SampledToken]) -> JsonObject:
        texts: list[str] = []
        offsets: list[int] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        for token in tokens:
            texts.append(self._token_text(token.token_id))
            offsets.append(self._num_characters)
            logprobs.append(_finite(token.logprob))
            tops.append({self._token_text(each.token_id): _finite(each.logprob) for each in token.top_logprobs})
            self._num_characters += len(texts[-1])
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _completion_choice(text: str, logprobs: JsonObject | None, reason: str | None) -> JsonObject:
    return {"index": _INDEX, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _finite(logprob: float) -> float:
    """JSON has no infinity; the API shows this number for it."""
    return max(logprob, _IMPOSSIBLE)


def _reason(finish: inference_pb2.Finish) -> str:
    return _FINISH_REASONS.get(finish.reason, "stop")


def _usage(usage: inference_pb2.Usage) -> JsonObject:
    """`prompt_tokens_details` is null where it is not known what was cached."""
    cached = usage.cached
    num_cached = cached.prefill_device + cached.decode_device + cached.host + cached.storage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached} if usage.HasField("cached") else None,
    }
