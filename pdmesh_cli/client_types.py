"""What the Python client takes and gives: frozen values without a trace of the wire, and their translation.

Owned by `client`; nothing here talks to anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pdmesh.v1 import inference_pb2


class PdmeshError(Exception):
    """A call that did not end well. `code` is the name of the gRPC status, e.g. "INVALID_ARGUMENT".

    `retry_after_s` is how long the server asks to wait before the same call; None where waiting does not help.
    """

    def __init__(self, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str


Prompt = str | Sequence[ChatMessage] | Sequence[int]
"""Plain text, a conversation, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """How to continue a prompt. What is None or empty takes the server's default."""

    model: str = ""
    # A LoRA adapter of the model, by the name under which nodes have it.
    adapter: str = ""
    request_id: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    cache_salt: bytes = b""
    # How many answers; sample i is what a request of its own with the seed `seed + i` would get.
    num_samples: int | None = None
    # Token ids, and what is added to their logits.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    # Alternatives to tell for each token of the prompt, beside its own log-probability.
    num_prompt_logprobs: int | None = None
    json_schema: str | None = None
    """The answer is JSON that this schema allows. Not together with `regex`."""
    regex: str | None = None
    """The answer matches this expression as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of the answer or the prompt."""

    token_id: int
    logprob: float | None
    top_logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request runs. No `prefill_node`: the decode node prefills itself. No `trace_id`: tracing is off."""

    request_id: str
    decode_node: str
    prefill_node: str
    trace_id: str
    # The sample that it belongs to, here and below.
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """What the prompt's tokens were worth, the first one apart; before the first Delta, when it was asked for."""

    tokens: tuple[Token, ...]
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """More of the answer. The text may be empty while a character or a possible stop string is incomplete."""

    text: str
    tokens: tuple[Token, ...]
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """Prompt tokens that were not computed for this request, by where they came from."""

    prefill_device: int = 0
    decode_device: int = 0
    host: int = 0
    storage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one sample used. The prompt counts in the first one alone, so usages add up to that of the request."""

    prompt_tokens: int
    completion_tokens: int
    cached: CachedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What the serving nodes measured; milliseconds, bytes and counts as in `pdmesh.v1.Timings`."""

    prefill_queue_ms: float
    prefill_compute_ms: float
    transfer_ms: float
    transfer_exposed_ms: float
    transferred_bytes: int
    transferred_runs: int
    transferred_blocks: int
    time_to_first_token_ms: float
    decode_ms: float


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The regular end of an answer, and what it cost."""

    reason: FinishReason
    matched_token_id: int | None
    matched_stop: str | None
    usage: Usage
    timings: Timings
    # How often the request was moved because a node had failed.
    num_replacements: int = 0
    index: int = 0


Event = Placement | PromptLogprobs | Delta | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    tokens: tuple[Token, ...] = field(repr=False)
    placement: Placement
    finish: Finish
    # Empty unless `num_prompt_logprobs` asked for them.
    prompt_tokens: tuple[Token, ...] = field(repr=False, default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A served model, or an adapter of the model `parent`; `context_tokens` bounds prompt and completion together."""

    name: str
    context_tokens: int
    vocab_size: int
    parent: str = ""


def request_message(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The wire form of a request. Raises ValueError for a prompt that mixes messages and token ids, or two forms."""
    request = inference_pb2.GenerateRequest(
        request_id=options.request_id,
        model=options.model,
        adapter=options.adapter,
        max_tokens=options.max_tokens,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        num_logprobs=options.num_logprobs,
        cache_salt=options.cache_salt,
        num_samples=options.num_samples,
        num_prompt_logprobs=options.num_prompt_logprobs,
        sampling=inference_pb2.SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            logit_bias=options.logit_bias,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            repetition_penalty=options.repetition_penalty,
            structured_output=_form_of(options),
        ),
    )
    if isinstance(prompt, str):
        request.text = prompt
        return request
    messages = [part for part in prompt if isinstance(part, ChatMessage)]
    token_ids = [part for part in prompt if isinstance(part, int)]
    if messages and token_ids:
        raise ValueError("prompt: give either chat messages or token ids, not both")
    if messages:
        turns = [inference_pb2.ChatMessage(role=each.role, content=each.content) for each in messages]
        request.chat.CopyFrom(inference_pb2.ChatPrompt(messages=turns))
    else:
        request.tokens.CopyFrom(inference_pb2.TokenPrompt(token_ids=token_ids))
    return request


def _form_of(options: GenerateOptions) -> inference_pb2.StructuredOutput | None:
    """Raises ValueError when there are two."""
    if options.json_schema is not None and options.regex is not None:
        raise ValueError("json_schema, regex: give one of them, not both")
    if options.json_schema is not None:
        return inference_pb2.StructuredOutput(json_schema=options.json_schema)
    return None if options.regex is None else inference_pb2.StructuredOutput(regex=options.regex)


def event_of(response: inference_pb2.GenerateResponse) -> Event:
    """The typed form of one streamed message. Raises PdmeshError for one that this client does not know."""
    match response.WhichOneof("event"):
        case "placement":
            placed = response.placement
            return Placement(
                request_id=placed.request_id,
                decode_node=placed.decode_node,
                prefill_node=placed.prefill_node,
                trace_id=placed.trace_id,
                index=response.index,
            )
        case "prompt_logprobs":
            tokens = tuple(_token_of(token) for token in response.prompt_logprobs.tokens)
            return PromptLogprobs(tokens=tokens, index=response.index)
        case "delta":
            tokens = tuple(_token_of(token) for token in response.delta.tokens)
            return Delta(text=response.delta.text, tokens=tokens, index=response.index)
        case "finish":
            return _finish_of(response.finish, response.index)
        case _:
            raise PdmeshError("INTERNAL", "the server sent an event that this client does not know; update the client")


def _token_of(message: inference_pb2.SampledToken) -> Token:
    return Token(
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple(TokenLogprob(token_id=top.token_id, logprob=top.logprob) for top in message.top_logprobs),
    )


def _finish_of(message: inference_pb2.Finish, index: int) -> Finish:
    stopped = message.reason == inference_pb2.FINISH_REASON_STOP
    return Finish(
        reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
        matched_token_id=message.matched_token_id if message.HasField("matched_token_id") else None,
        matched_stop=message.matched_stop if message.HasField("matched_stop") else None,
        usage=_usage_of(message.usage),
        timings=_timings_of(message.timings),
        num_replacements=message.num_replacements,
        index=index,
    )


def _usage_of(message: inference_pb2.Usage) -> Usage:
    cached = message.cached
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached=CachedTokens(
            prefill_device=cached.prefill_device,
            decode_device=cached.decode_device,
            host=cached.host,
            storage=cached.storage,
        ),
    )


def _timings_of(message: inference_pb2.Timings) -> Timings:
    return Timings(
        prefill_queue_ms=message.prefill_queue_ms,
        prefill_compute_ms=message.prefill_compute_ms,
        transfer_ms=message.transfer_ms,
        transfer_exposed_ms=message.transfer_exposed_ms,
        transferred_bytes=message.transferred_bytes,
        transferred_runs=message.transferred_runs,
        transferred_blocks=message.transferred_blocks,
        time_to_first_token_ms=message.time_to_first_token_ms,
        decode_ms=message.decode_ms,
    )
