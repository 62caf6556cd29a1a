"""What clients of the OpenAI API may send, and the request of the Inference service that it means.

Fields are checked for their types here; every other rule is the service's. A field that this API knows and the mesh
cannot honour is refused by name unless it is set to what is done anyway: nothing is ignored that would change an
answer.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, Literal, TypeVar

from pdmesh.v1 import inference_pb2
from pydantic import BeforeValidator, Field, JsonValue, ValidationError

from model_runtime.text.tokenizer import Tokenizer
from router_node.openai_api.chat_messages import Choice, Function, Message, StrictModel, Tool
from router_node.openai_api.failures import BadBody
from router_node.openai_api.tool_calls import CallRules, forced_call_schema

_UINT32_MAX: Final = 2**32 - 1
_UINT64_MASK: Final = 2**64 - 1
# The API's default, where the Inference service's is greedy.
_DEFAULT_TEMPERATURE: Final = 1.0
_ANY_OBJECT: Final = '{"type": "object"}'
_FORM_NAMES: Final = MappingProxyType(
    {
        "sampling.structured_output.json_schema": "response_format.json_schema.schema",
        "sampling.structured_output.regex": "structured_outputs.regex",
    }
)

TokenId = Annotated[int, Field(ge=0, le=_UINT32_MAX)]


def _as_list(value: object) -> object:
    """One string stands for a list of one."""
    return [value] if isinstance(value, str) else value


class StreamOptions(StrictModel):
    """How a stream is told."""

    include_usage: bool | None = None
    # Padding against eavesdroppers who know the sizes of packets: none is added.
    include_obfuscation: bool | None = None
    # Usage in every chunk, which load generators ask for and do without: it comes in the last one all the same.
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(StrictModel):
    """A schema with a name of the client's. It is always kept, `strict` or not."""

    name: str
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def to_proto(self) -> inference_pb2.StructuredOutput | None:
        match self.type:
            case "json_object":
                return inference_pb2.StructuredOutput(json_schema=_ANY_OBJECT)
            case "json_schema" if self.json_schema is not None:
                schema = json.dumps(self.json_schema.schema_, ensure_ascii=False)
                return inference_pb2.StructuredOutput(json_schema=schema)
            case "json_schema":
                name = "response_format.json_schema"
                raise BadBody(f"{name}: required with the type json_schema", param=name)
        return None


class StructuredOutputs(StrictModel):
    """Forms beyond the API, under the name that another server gives them."""

    regex: str


class GenerationBody(StrictModel, ABC):
    """What both ways to ask for text have in common."""

    field_names: ClassVar[Mapping[str, str]]

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_UINT32_MAX)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_as_list)] = None
    n: Annotated[int, Field(ge=1, le=_UINT32_MAX)] | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Names of the client's for its own books.
    user: str | None = None
    # Beyond the API, under the names that other servers use.
    repetition_penalty: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=_UINT32_MAX)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives whose log-probabilities are wanted; None: none at all, not even the token's own."""

    @abstractmethod
    def _set_prompt(self, request: inference_pb2.GenerateRequest) -> None: ...

    def _max_tokens(self) -> int | None:
        return self.max_tokens

    def _form(self) -> inference_pb2.StructuredOutput | None:
        """The form that the output is to have. Raises BadBody when there are two."""
        form = None if self.response_format is None else self.response_format.to_proto()
        if self.structured_outputs is None:
            return form
        if form is not None:
            raise BadBody("structured_outputs: not allowed beside response_format", param="structured_outputs")
        return inference_pb2.StructuredOutput(regex=self.structured_outputs.regex)

    def echo_text(self, tokenizer: Tokenizer) -> str:
        """What is to come before the text of each sample."""
        return ""

    def own_field_names(self) -> Mapping[str, str]:
        """`field_names` for this body."""
        return self.field_names

    def call_rules(self) -> CallRules | None:
        """How calls of tools are told from text; None where there are no tools."""
        return None

    def _refused(self) -> Mapping[str, bool]:
        """Whether each field that the mesh cannot honour asks for something."""
        return {}

    def _biases(self) -> dict[int, float]:
        """By token id; JSON has them as strings."""
        biases: dict[int, float] = {}
        for token, bias in (self.logit_bias or {}).items():
            if not re.fullmatch(r"[0-9]{1,9}", token):
                raise BadBody(f"logit_bias: {token[:20]!r} is no token id", param="logit_bias")
            if int(token) in biases:
                raise BadBody(f"logit_bias: token {int(token)} is given twice", param="logit_bias")
            biases[int(token)] = bias
        return biases

    def to_request(self, request_id: str) -> inference_pb2.GenerateRequest:
        """The same as a request of the Inference service. Raises BadBody for what that cannot express."""
        for name, is_wanted in self._refused().items():
            if is_wanted:
                raise BadBody(f"{name}: not supported by this server", param=name)
        if self.stream_options is not None and not self.is_streamed:
            raise BadBody("stream_options: only allowed with stream", param="stream_options")
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            model=self.model,
            sampling=inference_pb2.SamplingParams(
                temperature=_DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
                # What other servers take for "all".
                top_k=None if self.top_k in (-1, None) else self.top_k,
                top_p=self.top_p,
                seed=None if self.seed is None else self.seed & _UINT64_MASK,
                logit_bias=self._biases(),
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                structured_output=self._form(),
            ),
            max_tokens=self._max_tokens(),
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            num_logprobs=self.num_logprobs,
            num_samples=self.n,
            cache_salt=(self.cache_salt or "").encode(),
        )
        self._set_prompt(request)
        return request


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    field_names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "prompt.chat.messages": "messages",
            "prompt.chat.tools_json": "tools",
            "prompt.chat": "messages",
            "prompt": "messages",
            "num_logprobs": "top_logprobs",
            "num_samples": "n",
            **_FORM_NAMES,
        }
    )

    messages: list[Message]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_UINT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_UINT32_MAX)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    # Of the client's own books, or of what only OpenAI runs.
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadBody("top_logprobs: only allowed with logprobs", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def _max_tokens(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens is not None:
            raise BadBody("max_tokens: not allowed beside max_completion_tokens, which replaces it", param="max_tokens")
        return self.max_completion_tokens

    def call_rules(self) -> CallRules | None:
        names = frozenset(tool.function.name for tool in self._shown_tools())
        if not names:
            return None
        return CallRules(
            names=names,
            takes_several=self.parallel_tool_calls is not False,
            is_forced=bool(self._forced_functions()),
        )

    def own_field_names(self) -> Mapping[str, str]:
        if not self._forced_functions():
            return self.field_names
        return {**self.field_names, "sampling.structured_output.json_schema": "tools"}

    def _shown_tools(self) -> list[Tool]:
        is_none = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if is_none else self.tools or []

    def _forced_functions(self) -> list[Function]:
        """Those of which one must be called; none where the model may do without. Raises BadBody."""
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return []
        functions = [tool.function for tool in self.tools or ()]
        if not functions:
            raise BadBody(f"tool_choice: {choice.type} is only allowed with tools", param="tool_choice")
        if choice.type == "required":
            return functions
        if choice.function is None:
            raise BadBody("tool_choice.function: required with the type function", param="tool_choice.function")
        named = [function for function in functions if function.name == choice.function.name]
        if not named:
            message = f'tool_choice.function.name: "{choice.function.name}" is none of tools'
            raise BadBody(message, param="tool_choice.function.name")
        return named

    def _form(self) -> inference_pb2.StructuredOutput | None:
        form, forced = super()._form(), self._forced_functions()
        if not forced:
            return form
        if form is not None:
            message = "tool_choice: where a call must be made, response_format and structured_outputs are not allowed"
            raise BadBody(message, param="tool_choice")
        return inference_pb2.StructuredOutput(json_schema=forced_call_schema(forced))

    def _set_prompt(self, request: inference_pb2.GenerateRequest) -> None:
        request.chat.SetInParent()
        request.chat.messages.extend(message.to_proto() for message in self.messages)
        request.chat.tools_json.extend(tool.to_json() for tool in self._shown_tools())


def _one_prompt(value: JsonValue) -> JsonValue:
    """A list of one prompt stands for that prompt."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"{len(value)} prompts given, 1 allowed: send one request for each")
        return value[0]
    return value


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    field_names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "prompt.text": "prompt",
            "prompt.tokens.token_ids": "prompt",
            "num_logprobs": "logprobs",
            "num_prompt_logprobs": "logprobs",
            "num_samples": "n",
            **_FORM_NAMES,
        }
    )

    prompt: Annotated[JsonValue, BeforeValidator(_one_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=_UINT32_MAX)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def _refused(self) -> Mapping[str, bool]:
        return {"best_of": self.best_of not in (None, 1), "suffix": bool(self.suffix)}

    def echo_text(self, tokenizer: Tokenizer) -> str:
        if not self.echo:
            return ""
        if isinstance(self.prompt, str):
            return self.prompt
        return tokenizer.decode(token for token in _token_ids(self.prompt) if token < tokenizer.vocab_size)

    def _set_prompt(self, request: inference_pb2.GenerateRequest) -> None:
        match self.prompt:
            case str(text):
                request.text = text
            case tokens:
                request.tokens.SetInParent()
                request.tokens.token_ids.extend(_token_ids(tokens))
        if self.echo and self.logprobs is not None:
            request.num_prompt_logprobs = self.logprobs


def _token_ids(prompt: JsonValue) -> list[int]:
    if not isinstance(prompt, list):
        raise BadBody("prompt: a string, or a list of token ids, required", param="prompt")
    return [_token_id(index, value) for index, value in enumerate(prompt)]


def _token_id(index: int, value: JsonValue) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _UINT32_MAX:
        raise BadBody(f"prompt[{index}]: a token id required", param=f"prompt[{index}]")
    return value


BodyT = TypeVar("BodyT", bound=GenerationBody)


def parse_body(kind: type[BodyT], content: bytes) -> BodyT:
    """Raises BadBody naming the first field that is at fault."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = "unknown field"
    raise BadBody(f"{param}: {message}" if param else f"body: {message}", param=param or None)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
