"""From what a client asks for to what a decode node is told.

Every rule of the client API is checked here, and the prompt becomes tokens. Knows the tokenizer and the configured
limits, and no node. Long prompts are tokenised in a thread, because a megabyte of text takes a second and the event
loop serves everybody.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from pdmesh.v1 import decode_pb2, inference_pb2

from model_runtime.text.chat_template import ROLES, ChatMessage, JsonObject
from model_runtime.text.errors import ChatTemplateError
from model_runtime.text.grammar import FormError, check_form
from model_runtime.text.tokenizer import Tokenizer
from node_runtime.adapters import AdapterId, unknown_adapter
from node_runtime.errors import InvalidRequest, UnknownModel
from node_runtime.request_rules import (
    DEFAULT_MAX_TOKENS,
    MAX_CLIENT_STOP_TOKEN_IDS,
    check_cache_salt,
    check_lengths,
    check_logit_bias,
    check_num_logprobs,
    check_num_prompt_logprobs,
    check_num_samples,
    check_sampling,
    check_stop_strings,
    check_stop_token_ids,
    check_token_ids,
    require,
)
from node_runtime.wire.adapter import adapter_to_proto
from node_runtime.wire.output_form import form_from_proto
from router_node.json_text import read_json
from router_node.node_pool import TokenLimits

MAX_TOOLS = 128
_INLINE_PROMPT_BYTES = 4096
_SEED_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """Bytes of text that a request may bring."""

    max_prompt_bytes: int
    max_stop_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that breaks no rule, or one sample of it. `message` lacks only the prefill address; `stop` never leaves
    the router. `adapter` is what the message names.
    """

    message: decode_pb2.DecodeRequest
    stop: tuple[str, ...]
    sample: int = 0
    adapter: AdapterId | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.message.token_ids)

    def addressed(self, prefill_address: str) -> PreparedRequest:
        """The same with the prefill node's address, empty for none."""
        message = decode_pb2.DecodeRequest()
        message.CopyFrom(self.message)
        message.prefill_address = prefill_address
        return replace(self, message=message)


def num_samples_of(request: inference_pb2.GenerateRequest) -> int:
    """How many answers are wanted. Raises InvalidRequest."""
    num_samples = request.num_samples if request.HasField("num_samples") else 1
    check_num_samples(num_samples)
    return num_samples


def samples_of(prepared: PreparedRequest, num_samples: int) -> tuple[PreparedRequest, ...]:
    """One request for each sample. They differ in their seeds: that of sample i is (seed + i) mod 2^64."""
    return tuple(_sample_of(prepared, index) for index in range(num_samples))


def _sample_of(prepared: PreparedRequest, index: int) -> PreparedRequest:
    message = decode_pb2.DecodeRequest()
    message.CopyFrom(prepared.message)
    # The sampler mixes the bits of a seed, so neighbours have nothing in common.
    message.sampling.seed = (message.sampling.seed + index) % (1 << _SEED_BITS)
    if index:
        # All have the same prompt, and the first one tells of it.
        message.ClearField("num_prompt_logprobs")
    return replace(prepared, message=message, sample=index)


class RequestPreparer:
    """Stateless apart from what it was made of."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        limits: PromptLimits,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(_SEED_BITS),
    ) -> None:
        """`draw_seed` gives the seed, in [0, 2**64), of a request that brings none."""
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._limits = limits
        self._draw_seed = draw_seed

    def find_adapter(self, request: inference_pb2.GenerateRequest, served: Mapping[str, AdapterId]) -> AdapterId | None:
        """Which of the `served` ones, by name, changes the model for the request.

        Either field may name it. Raises UnknownModel, or InvalidRequest when the two contradict each other.
        """
        is_base = request.model in ("", self._model_name)
        if not is_base and request.model not in served:
            names = ", ".join(f'"{name}"' for name in (self._model_name, *sorted(served)))
            raise UnknownModel(f'model: "{request.model}" is not served here, only {names} {_are(1 + len(served))}')
        if request.adapter and request.adapter not in served:
            raise unknown_adapter(request.adapter, served)
        require(
            is_base or request.adapter in ("", request.model),
            f'adapter: "{request.adapter}" given beside model "{request.model}", which is another adapter',
        )
        name = request.adapter or ("" if is_base else request.model)
        return served[name] if name else None

    def check(self, request: inference_pb2.GenerateRequest) -> None:
        """Everything else that can be known without tokenising. Raises InvalidRequest by field and limit."""
        self._check_prompt(request)
        check_sampling(request.sampling)
        check_logit_bias(request.sampling.logit_bias, self._tokenizer.vocab_size)
        check_num_logprobs(request.num_logprobs if request.HasField("num_logprobs") else None)
        if request.HasField("max_tokens"):
            require(request.max_tokens >= 1, f"max_tokens: {request.max_tokens} given, at least 1 required")
        check_stop_strings(request.stop)
        for index, text in enumerate(request.stop):
            self._check_bytes(f"stop[{index}]", len(text.encode()), self._limits.max_stop_bytes)
        check_stop_token_ids(request.stop_token_ids, self._tokenizer.vocab_size, limit=MAX_CLIENT_STOP_TOKEN_IDS)
        check_cache_salt(request.cache_salt)
        require(
            form_from_proto(request.sampling) is None or not request.ignore_eos,
            "ignore_eos: not allowed with sampling.structured_output, which ends in an end token",
        )

    async def check_form(self, request: inference_pb2.GenerateRequest) -> None:
        """Compiles the form that the output is to have, off the event loop; requires `check`. Raises InvalidRequest."""
        form = form_from_proto(request.sampling)
        if form is None:
            return
        try:
            await asyncio.to_thread(check_form, form)
        except FormError as error:
            raise InvalidRequest(f"sampling.structured_output.{error}") from None

    async def tokenize(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """The prompt's tokens; requires `check`. Raises InvalidRequest when the chat template refuses."""
        if request.WhichOneof("prompt") == "tokens":
            return list(request.tokens.token_ids)
        if request.ByteSize() <= _INLINE_PROMPT_BYTES:
            return self._encode(request)
        return await asyncio.to_thread(self._encode, request)

    def prepare(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        token_ids: list[int],
        limits: TokenLimits | None,
        *,
        tenant: str = "",
        adapter: AdapterId | None = None,
    ) -> PreparedRequest:
        """The decode node's request. `limits` are those of the nodes, None when no node is known.

        Requests of one `tenant` share no cache with those of another.

        Raises InvalidRequest when prompt and completion exceed the context, and leaves the arena to placement.
        """
        own_tokens = self._tokenizer.max_context_tokens
        context_tokens = own_tokens if limits is None else min(own_tokens, limits.context_tokens)
        request_tokens = context_tokens if limits is None else min(context_tokens, limits.max_request_tokens)
        require(len(token_ids) > 0, "prompt: the text has no tokens")
        max_tokens = min(DEFAULT_MAX_TOKENS, max(1, request_tokens - len(token_ids)))
        if request.HasField("max_tokens"):
            max_tokens = request.max_tokens
        check_lengths(len(token_ids), max_tokens, context_tokens)
        num_prompt_logprobs = request.num_prompt_logprobs if request.HasField("num_prompt_logprobs") else None
        check_num_prompt_logprobs(num_prompt_logprobs, len(token_ids))
        message = decode_pb2.DecodeRequest(
            request_id=request_id,
            token_ids=token_ids,
            sampling=request.sampling,
            max_tokens=max_tokens,
            stop_token_ids=self._stop_token_ids(request),
            num_logprobs=request.num_logprobs if request.HasField("num_logprobs") else None,
            num_prompt_logprobs=num_prompt_logprobs,
            adapter=adapter_to_proto(adapter),
            extra_keys=[key for key in (tenant.encode(), request.cache_salt) if key],
        )
        if not message.sampling.HasField("seed"):
            message.sampling.seed = self._draw_seed()
        return PreparedRequest(message=message, stop=tuple(request.stop), adapter=adapter)

    def _check_prompt(self, request: inference_pb2.GenerateRequest) -> None:
        match request.WhichOneof("prompt"):
            case "text":
                require(request.text != "", "prompt.text: must not be empty")
                self._check_bytes("prompt.text", len(request.text.encode()), self._limits.max_prompt_bytes)
            case "chat":
                self._check_chat(request.chat)
            case "tokens":
                check_token_ids(request.tokens.token_ids, self._tokenizer.vocab_size, field="prompt.tokens.token_ids")
            case _:
                raise InvalidRequest("prompt: one of text, chat and tokens is required")

    def _check_chat(self, chat: inference_pb2.ChatPrompt) -> None:
        require(len(chat.messages) > 0, "prompt.chat.messages: empty, at least one message required")
        for index, message in enumerate(chat.messages):
            require(
                message.role in ROLES,
                f'prompt.chat.messages[{index}].role: "{message.role}" given, one of {", ".join(ROLES)} required',
            )
        require(
            len(chat.tools_json) <= MAX_TOOLS,
            f"prompt.chat.tools_json: {len(chat.tools_json)} given, at most {MAX_TOOLS} allowed",
        )
        num_bytes = sum(len(text.encode()) for text in _texts(chat))
        self._check_bytes("prompt.chat", num_bytes, self._limits.max_prompt_bytes)
        _read_tools(chat)
        for index, message in enumerate(chat.messages):
            _read_message(message, index)
        require(self._tokenizer.has_chat_template, "prompt.chat: the model has no chat template; send text or tokens")
        require(
            not chat.tools_json or self._tokenizer.shows_tools,
            "prompt.chat.tools_json: the model's chat template knows no tools",
        )

    def _check_bytes(self, field: str, num_bytes: int, limit: int) -> None:
        require(num_bytes <= limit, f"{field}: {num_bytes} bytes given, at most {limit} allowed")

    def _encode(self, request: inference_pb2.GenerateRequest) -> list[int]:
        if request.WhichOneof("prompt") == "text":
            return self._tokenizer.encode(request.text, add_special=True)
        messages = [_read_message(message, index) for index, message in enumerate(request.chat.messages)]
        try:
            return self._tokenizer.encode_chat(messages, _read_tools(request.chat))
        except ChatTemplateError as error:
            raise InvalidRequest(f"prompt.chat: {error}") from None

    def _stop_token_ids(self, request: inference_pb2.GenerateRequest) -> list[int]:
        own = () if request.ignore_eos else self._tokenizer.eos_token_ids
        return list(dict.fromkeys((*own, *request.stop_token_ids)))


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _texts(chat: inference_pb2.ChatPrompt) -> Iterator[str]:
    """All that a template may show."""
    yield from chat.tools_json
    for message in chat.messages:
        yield from (message.content, message.tool_call_id, message.name, *message.tool_calls_json)


def _read_tools(chat: inference_pb2.ChatPrompt) -> tuple[JsonObject, ...]:
    """Raises InvalidRequest."""
    return tuple(_read_object(f"prompt.chat.tools_json[{index}]", text) for index, text in enumerate(chat.tools_json))


def _read_message(message: inference_pb2.ChatMessage, index: int) -> ChatMessage:
    """Of a message whose role is known. Raises InvalidRequest."""
    field = f"prompt.chat.messages[{index}].tool_calls_json"
    calls = (_read_object(f"{field}[{place}]", text) for place, text in enumerate(message.tool_calls_json))
    return ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _read_object(field: str, text: str) -> JsonObject:
    try:
        value = read_json(text)
    except ValueError as error:
        raise InvalidRequest(f"{field}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field}: {type(value).__name__} given, a JSON object required")
    return value
