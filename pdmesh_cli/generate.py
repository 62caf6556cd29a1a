"""`pdmesh generate`: one prompt, its answer on standard output, what it cost on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from node_runtime.errors import BadConfig
from pdmesh_cli.client import AsyncPdmeshClient
from pdmesh_cli.client_types import (
    ChatMessage,
    Completion,
    Delta,
    Finish,
    GenerateOptions,
    Placement,
    Prompt,
    PromptLogprobs,
    Token,
)
from pdmesh_cli.identity import Identity
from pdmesh_cli.report import print_report


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished request as a command sees it."""

    placement: Placement
    finish: Finish


def prompt_text(given: str) -> str:
    """The prompt as it is given, or what standard input has for "-". Raises BadConfig for what is no text."""
    try:
        text = sys.stdin.read() if given == "-" else given
        # Bytes of the command line that are no characters come as surrogates.
        text.encode()
    except UnicodeError as error:
        raise BadConfig(f"prompt: is no text in UTF-8: {error}") from None
    return text


def schema_text(path: Path | None, regex: str | None) -> str | None:
    """What the file holds. Raises BadConfig when it cannot be read, or an expression was given as well."""
    if path is None:
        return None
    if regex is not None:
        raise BadConfig("json_schema, regex: give one of them, not both")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"json_schema: cannot read {path}: {error}") from None


def biases_of(given: Sequence[str]) -> dict[int, float]:
    """Biases written as TOKEN=BIAS. Raises BadConfig for others, and for a token that comes twice."""
    biases: dict[int, float] = {}
    for item in given:
        token_id, _, bias = item.partition("=")
        try:
            number, value = int(token_id), float(bias)
        except ValueError:
            raise BadConfig(f'logit_bias: "{item}" given, a token id, "=" and a number required') from None
        if number < 0 or number in biases:
            raise BadConfig(f"logit_bias: token {number} is below 0 or given twice")
        biases[number] = value
    return biases


def prompt_of(text: str, *, chat: bool, system: str | None) -> Prompt:
    """Plain text, or one user turn behind an optional system turn."""
    if not chat:
        return text
    turns = [ChatMessage(role="system", content=system)] if system else []
    return (*turns, ChatMessage(role="user", content=text))


async def stream_answer(
    client: AsyncPdmeshClient,
    prompt: Prompt,
    options: GenerateOptions,
    *,
    timeout_s: float,
    on_delta: Callable[[Delta], None],
    on_prompt: Callable[[PromptLogprobs], None] = lambda told: None,
) -> Answer:
    """Streams one answer into `on_delta`, and what the prompt was worth into `on_prompt`. Raises PdmeshError."""
    placement: Placement | None = None
    finish: Finish | None = None
    async with aclosing(client.generate(prompt, options, timeout_s=timeout_s)) as events:
        async for event in events:
            match event:
                case Placement():
                    placement = event
                case PromptLogprobs():
                    on_prompt(event)
                case Delta():
                    on_delta(event)
                case Finish():
                    finish = event
    if placement is None or finish is None:
        raise RuntimeError("the client ended a stream without Placement and Finish and raised nothing")
    return Answer(placement=placement, finish=finish)


async def run_generate(
    router: str,
    prompt: Prompt,
    options: GenerateOptions,
    *,
    timeout_s: float,
    identity: Identity,
    as_json: bool,
    out: Console,
    err: Console,
) -> None:
    """Carries out the command. Raises PdmeshError."""
    async with AsyncPdmeshClient(router, identity=identity) as client:
        num_samples = options.num_samples or 1
        if as_json or num_samples > 1:
            completions = await client.complete_all(prompt, options, timeout_s=timeout_s)
            for completion in completions:
                if as_json:
                    out.file.write(completion_json(completion) + "\n")
                else:
                    _print_sample(completion, options, out, err)
            return
        prompt_tokens: list[Token] = []
        tokens: list[Token] = []
        has_text = False

        def show(delta: Delta) -> None:
            nonlocal has_text
            has_text = has_text or bool(delta.text)
            tokens.extend(delta.tokens)
            out.file.write(delta.text)
            out.file.flush()

        try:
            answer = await stream_answer(
                client,
                prompt,
                options,
                timeout_s=timeout_s,
                on_delta=show,
                on_prompt=lambda told: prompt_tokens.extend(told.tokens),
            )
        except BaseException:
            # What is said about the failure begins on a line of its own.
            if has_text:
                end_line(out)
            raise
    end_line(out)
    _print_logprobs(prompt_tokens, "prompt", err)
    if options.num_logprobs is not None:
        _print_logprobs(tokens, "token", err)
    print_report(answer.placement, answer.finish, err)


def end_line(out: Console) -> None:
    out.file.write("\n")
    out.file.flush()


def completion_json(completion: Completion) -> str:
    """The whole answer as one JSON object, keys named like the fields of the client's types."""
    content = {
        "text": completion.text,
        "tokens": [asdict(token) for token in completion.tokens],
        "prompt_tokens": [asdict(token) for token in completion.prompt_tokens],
        "placement": asdict(completion.placement),
        "finish": {**asdict(completion.finish), "reason": completion.finish.reason.value},
    }
    return json.dumps(content, ensure_ascii=False)


def _print_sample(completion: Completion, options: GenerateOptions, out: Console, err: Console) -> None:
    """One of several answers, behind a line that says which."""
    out.file.write(f"[{completion.finish.index}]\n{completion.text}\n")
    out.file.flush()
    _print_logprobs(completion.prompt_tokens, "prompt", err)
    if options.num_logprobs is not None:
        _print_logprobs(completion.tokens, "token", err)
    print_report(completion.placement, completion.finish, err)


def _print_logprobs(tokens: Sequence[Token], word: str, err: Console) -> None:
    for token in tokens:
        if token.logprob is None:
            continue
        others = "  ".join(f"{other.token_id}: {other.logprob:.4f}" for other in token.top_logprobs)
        err.print(f"{word} {token.token_id:>6}  {token.logprob:9.4f}   {others}".rstrip(), highlight=False)
