"""`pdmesh generate`: one prompt, its answer on standard output, what it cost on standard error."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    Token,
)
from pdmesh_cli.identity import Identity
from pdmesh_cli.report import request_report


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished request as a command sees it."""

    placement: Placement
    finish: Finish


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
) -> Answer:
    """Streams one answer into `on_delta`. Raises PdmeshError."""
    placement: Placement | None = None
    finish: Finish | None = None
    async with aclosing(client.generate(prompt, options, timeout_s=timeout_s)) as events:
        async for event in events:
            match event:
                case Placement():
                    placement = event
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
        if as_json:
            completion = await client.complete(prompt, options, timeout_s=timeout_s)
            out.file.write(completion_json(completion) + "\n")
            return
        tokens: list[Token] = []
        has_text = False

        def show(delta: Delta) -> None:
            nonlocal has_text
            has_text = has_text or bool(delta.text)
            tokens.extend(delta.tokens)
            out.file.write(delta.text)
            out.file.flush()

        try:
            answer = await stream_answer(client, prompt, options, timeout_s=timeout_s, on_delta=show)
        except BaseException:
            # What is said about the failure begins on a line of its own.
            if has_text:
                end_line(out)
            raise
    end_line(out)
    if options.num_logprobs is not None:
        _print_logprobs(tokens, err)
    # Only a person at a terminal is served by lines that are broken to its width.
    err.print(request_report(answer.placement, answer.finish), soft_wrap=not err.is_terminal)


def end_line(out: Console) -> None:
    out.file.write("\n")
    out.file.flush()


def completion_json(completion: Completion) -> str:
    """The whole answer as one JSON object, keys named like the fields of the client's types."""
    content = {
        "text": completion.text,
        "tokens": [asdict(token) for token in completion.tokens],
        "placement": asdict(completion.placement),
        "finish": {**asdict(completion.finish), "reason": completion.finish.reason.value},
    }
    return json.dumps(content, ensure_ascii=False)


def _print_logprobs(tokens: list[Token], err: Console) -> None:
    for token in tokens:
        if token.logprob is None:
            continue
        others = "  ".join(f"{other.token_id}: {other.logprob:.4f}" for other in token.top_logprobs)
        err.print(f"token {token.token_id:>6}  {token.logprob:9.4f}   {others}".rstrip(), highlight=False)
