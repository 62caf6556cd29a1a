"""Conversations at the terminal, against a client that repeats what it was sent."""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Callable
from io import StringIO

import pytest
from rich.console import Console
from unit.pdmesh_cli.test_load import NO_TIMINGS

from pdmesh_cli.chat import Conversation, run_chat
from pdmesh_cli.client_types import (
    CachedTokens,
    ChatMessage,
    Delta,
    Event,
    Finish,
    FinishReason,
    GenerateOptions,
    PdmeshError,
    Placement,
    Prompt,
    Usage,
)


class RepeatingClient:
    """Answers "1", "2", ...; fails where the last turn says so."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []

    async def generate(
        self, prompt: Prompt, options: GenerateOptions, *, timeout_s: float
    ) -> AsyncGenerator[Event, None]:
        turns = [(turn.role, turn.content) for turn in prompt if isinstance(turn, ChatMessage)]
        self.asked.append(turns)
        if turns[-1][1] == "fail":
            raise PdmeshError("UNAVAILABLE", "no node")
        yield Placement(request_id="r", decode_node="d", prefill_node="p", trace_id="")
        yield Delta(text=str(len(self.asked)), tokens=())
        usage = Usage(prompt_tokens=9, completion_tokens=1, cached=CachedTokens(decode_device=4))
        yield Finish(
            reason=FinishReason.STOP, matched_token_id=None, matched_stop=None, usage=usage, timings=NO_TIMINGS
        )


def lines(*given: str) -> Callable[[], str]:
    left = iter(given)

    def read_line() -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read_line


async def talk(*given: str, system: str | None = None) -> tuple[RepeatingClient, str, str]:
    client, out, err = RepeatingClient(), StringIO(), StringIO()
    err_console = Console(file=err, width=200)
    conversation = Conversation(
        client,  # type: ignore[arg-type]
        GenerateOptions(),
        system=system,
        timeout_s=5.0,
        out=Console(file=out, width=200),
        err=err_console,
    )
    await run_chat(conversation, read_line=lines(*given), err=err_console)
    return client, out.getvalue(), err.getvalue()


async def test_every_turn_brings_the_turns_before_it() -> None:
    client, out, err = await talk("one", "", "two", system="be brief")
    opening = [("system", "be brief"), ("user", "one")]
    assert client.asked == [opening, [*opening, ("assistant", "1"), ("user", "two")]]
    assert out == "1\n2\n"
    assert "9 prompt tokens, 4 of them cached" in err


async def test_a_new_conversation_keeps_the_system_message_alone() -> None:
    client, _, _ = await talk("one", "/new", "two", system="be brief")
    assert client.asked[1] == [("system", "be brief"), ("user", "two")]


async def test_a_turn_that_failed_is_told_and_not_kept() -> None:
    client, _, err = await talk("fail", "two")
    assert "UNAVAILABLE: no node" in err
    assert client.asked[1] == [("user", "two")]


async def test_commands_are_not_sent() -> None:
    client, _, err = await talk("/help", "/quit", "never")
    assert client.asked == []
    assert err.count("/quit") == 2


async def test_an_interrupt_at_the_prompt_ends_the_conversation_at_once() -> None:
    """Not only when the line is complete."""

    def interrupted() -> str:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the wait went on")

    err = Console(file=StringIO(), width=200)
    conversation = Conversation(
        RepeatingClient(),  # type: ignore[arg-type]
        GenerateOptions(),
        system=None,
        timeout_s=5.0,
        out=Console(file=StringIO()),
        err=err,
    )
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        await run_chat(conversation, read_line=interrupted, err=err)
    assert signal.getsignal(signal.SIGINT) is before
