"""What the Inference service answers, in the objects of the OpenAI API: whole, or as the chunks of a stream.

Without I/O and clock. One object per request. Logarithms, counts and reasons are the service's own; here they only
change their names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from pdmesh.v1 import inference_pb2

from model_runtime.text.tokenizer import Tokenizer
from router_node.openai_api.tool_calls import CallReader, CallRules, Found, FoundCall, MoreArguments, joined

JsonObject = dict[str, object]

_FINISH_REASONS: Mapping[int, str] = MappingProxyType(
    {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}
)
_IMPOSSIBLE: Final = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What all objects of one answer begin with, and what is to be told in it.

    `created_s` is seconds since the Unix epoch. `echo` is the prompt's text where it is to come before each sample's.
    `call_rules` says how calls of tools are told from text.
    """

    request_id: str
    model: str
    created_s: int
    with_logprobs: bool
    with_usage_in_stream: bool
    echo: str = ""
    call_rules: CallRules | None = None


@dataclass(slots=True, kw_only=True)
class Sample:
    """What one of the samples of an answer has come to."""

    deltas: list[inference_pb2.Delta] = field(default_factory=list)
    finish: inference_pb2.Finish | None = None


class AnswerShape(ABC):
    """The objects of one answer: chunks of its samples, each in order, then the usage of all; or `whole`."""

    whole_object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._prompt_tokens: Sequence[inference_pb2.SampledToken] = ()

    def take_prompt_logprobs(self, tokens: Sequence[inference_pb2.SampledToken]) -> None:
        """Those of the prompt, before any delta."""
        self._prompt_tokens = tokens

    @abstractmethod
    def opening(self, index: int) -> Sequence[JsonObject]:
        """Chunks of a sample before any of its text."""

    @abstractmethod
    def chunk(self, index: int, delta: inference_pb2.Delta) -> JsonObject | None:
        """The chunk that shows this; None when there is nothing to show yet."""

    @abstractmethod
    def _last_choice(self, index: int, reason: str) -> JsonObject: ...

    @abstractmethod
    def _whole_choice(self, index: int, deltas: Sequence[inference_pb2.Delta], reason: str) -> JsonObject: ...

    def closing(self, index: int, finish: inference_pb2.Finish) -> Sequence[JsonObject]:
        """The last chunks of a sample."""
        return [self._object(self.chunk_object, [self._last_choice(index, _reason(finish))])]

    def usage(self, finishes: Iterable[inference_pb2.Finish]) -> Sequence[JsonObject]:
        """Chunks behind those of all samples."""
        if not self._head.with_usage_in_stream:
            return ()
        return [{**self._object(self.chunk_object, []), "usage": _usage(finishes)}]

    def whole(self, samples: Mapping[int, Sample]) -> JsonObject:
        """The one object that an answer without streaming is. All samples are finished."""
        finishes = {index: sample.finish for index, sample in sorted(samples.items()) if sample.finish is not None}
        choices = [
            self._whole_choice(index, samples[index].deltas, _reason(finish)) for index, finish in finishes.items()
        ]
        return {**self._object(self.whole_object, choices), "usage": _usage(finishes.values())}

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

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


class ChatAnswer(AnswerShape):
    """Objects of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        super().__init__(head, tokenizer)
        # By sample, where there are tools.
        self._readers: dict[int, CallReader] = {}

    def opening(self, index: int) -> Sequence[JsonObject]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None)]

    def chunk(self, index: int, delta: inference_pb2.Delta) -> JsonObject | None:
        logprobs = self._logprobs(delta.tokens) if self._head.with_logprobs else None
        shown = self._shown(index, self._found(index, delta.text))
        if not shown and not (logprobs and delta.tokens):
            return None
        return self._chunk(index, shown or {"content": ""}, logprobs)

    def closing(self, index: int, finish: inference_pb2.Finish) -> Sequence[JsonObject]:
        reader = self._readers.get(index)
        if reader is None:
            return super().closing(index, finish)
        shown = self._shown(index, reader.finish())
        rest = [self._chunk(index, shown, None)] if shown else []
        last = self._last_choice(index, _reason_with_calls(_reason(finish), reader.num_calls))
        return [*rest, self._object(self.chunk_object, [last])]

    def _found(self, index: int, text: str) -> Sequence[Found]:
        """What is to be shown now that the text of a sample goes on with this."""
        rules = self._head.call_rules
        if not text or rules is None:
            return [text] if text else []
        if index not in self._readers:
            self._readers[index] = rules.reader()
        return self._readers[index].feed(text)

    def _shown(self, index: int, found: Sequence[Found], *, is_whole: bool = False) -> JsonObject:
        """The fields of a delta, or of a whole message, that show it; none for nothing."""
        text = "".join(part for part in found if isinstance(part, str))
        shown: JsonObject = {"content": text} if text else {}
        calls = [part for part in joined(found) if not isinstance(part, str)]
        if not calls:
            return shown
        place = self._readers[index].num_calls - sum(isinstance(call, FoundCall) for call in calls) - 1
        shown_calls: list[JsonObject] = []
        for call in calls:
            place += isinstance(call, FoundCall)
            number: JsonObject = {} if is_whole else {"index": place}
            shown_calls.append({**number, **self._call(index, place, call)})
        return {**shown, "tool_calls": shown_calls}

    def _call(self, index: int, place: int, call: FoundCall | MoreArguments) -> JsonObject:
        if isinstance(call, MoreArguments):
            return {"function": {"arguments": call.text}}
        return {
            "id": f"call_{self._head.request_id}_{index}_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _whole_choice(self, index: int, deltas: Sequence[inference_pb2.Delta], reason: str) -> JsonObject:
        tokens = [token for delta in deltas for token in delta.tokens]
        begun = self._found(index, "".join(delta.text for delta in deltas))
        reader = self._readers.get(index)
        shown = self._shown(index, begun if reader is None else [*begun, *reader.finish()], is_whole=True)
        num_calls = 0 if reader is None else reader.num_calls
        # Where there is nothing but calls the API has no text, not an empty one.
        message = {"role": "assistant", "content": None if num_calls else "", "refusal": None, **shown}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(tokens) if self._head.with_logprobs else None,
            "finish_reason": _reason_with_calls(reason, num_calls),
        }

    def _last_choice(self, index: int, reason: str) -> JsonObject:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def _chunk(self, index: int, shown: JsonObject, logprobs: JsonObject | None) -> JsonObject:
        choice: JsonObject = {"index": index, "delta": shown, "logprobs": logprobs, "finish_reason": None}
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
    """Objects of /v1/completions. An echo is the beginning of every sample, its tokens' log-probabilities too."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        super().__init__(head, tokenizer)
        # By sample: characters in front of its next token, as its tokens spell them one by one.
        self._num_characters: Counter[int] = Counter()

    def opening(self, index: int) -> Sequence[JsonObject]:
        if not self._head.echo:
            return ()
        logprobs = self._logprobs(index, self._prompt_tokens) if self._head.with_logprobs else None
        return [self._chunk(index, self._head.echo, logprobs)]

    def chunk(self, index: int, delta: inference_pb2.Delta) -> JsonObject | None:
        logprobs = self._logprobs(index, delta.tokens) if self._head.with_logprobs else None
        if not delta.text and not (logprobs and delta.tokens):
            return None
        return self._chunk(index, delta.text, logprobs)

    def _whole_choice(self, index: int, deltas: Sequence[inference_pb2.Delta], reason: str) -> JsonObject:
        tokens = [*self._prompt_tokens, *(token for delta in deltas for token in delta.tokens)]
        logprobs = self._logprobs(index, tokens) if self._head.with_logprobs else None
        text = self._head.echo + "".join(delta.text for delta in deltas)
        return _completion_choice(index, text, logprobs, reason)

    def _last_choice(self, index: int, reason: str) -> JsonObject:
        return _completion_choice(index, "", None, reason)

    def _chunk(self, index: int, text: str, logprobs: JsonObject | None) -> JsonObject:
        return self._object(self.chunk_object, [_completion_choice(index, text, logprobs, None)])

    def _logprobs(self, index: int, tokens: Iterable[inference_pb2.SampledToken]) -> JsonObject:
        """The first token of a prompt has no log-probability."""
        texts: list[str] = []
        offsets: list[int] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token in tokens:
            texts.append(self._token_text(token.token_id))
            offsets.append(self._num_characters[index])
            is_known = token.HasField("logprob")
            logprobs.append(_finite(token.logprob) if is_known else None)
            top = {self._token_text(each.token_id): _finite(each.logprob) for each in token.top_logprobs}
            tops.append(top if is_known else None)
            self._num_characters[index] += len(texts[-1])
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _completion_choice(index: int, text: str, logprobs: JsonObject | None, reason: str | None) -> JsonObject:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _finite(logprob: float) -> float:
    """JSON has no infinity; the API shows this number for it."""
    return max(logprob, _IMPOSSIBLE)


def _reason(finish: inference_pb2.Finish) -> str:
    return _FINISH_REASONS.get(finish.reason, "stop")


def _reason_with_calls(reason: str, num_calls: int) -> str:
    """An answer that is cut off is that, whatever it has called."""
    return "tool_calls" if num_calls and reason == "stop" else reason


def _usage(finishes: Iterable[inference_pb2.Finish]) -> JsonObject:
    """Of all samples together. `prompt_tokens_details` is null where it is not known what was cached."""
    usages = [finish.usage for finish in finishes]
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    known = [usage.cached for usage in usages if usage.HasField("cached")]
    num_cached = sum(each.prefill_device + each.decode_device + each.host + each.storage for each in known)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached} if known else None,
    }
