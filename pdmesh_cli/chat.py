"""`pdmesh chat`: a conversation at the terminal. Every turn sends all of it: the mesh has its beginning cached."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

from rich.console import Console

from pdmesh_cli.client import AsyncPdmeshClient
from pdmesh_cli.client_types import ChatMessage, Delta, Finish, GenerateOptions, PdmeshError
from pdmesh_cli.generate import stream_answer
from pdmesh_cli.report import describe_speed, num_cached_tokens

PROMPT = "you> "
HELP = "/new begins a new conversation, /quit or the end of the input ends; Ctrl-C stops an answer"


class Conversation:
    """The turns so far, and the client that continues them."""

    def __init__(
        self,
        client: AsyncPdmeshClient,
        options: GenerateOptions,
        *,
        system: str | None,
        timeout_s: float,
        out: Console,
        err: Console,
    ) -> None:
        self._client = client
        self._options = options
        self._opening = [ChatMessage(role="system", content=system)] if system else []
        self._turns = list(self._opening)
        self._timeout_s = timeout_s
        self._out = out
        self._err = err

    def begin_anew(self) -> None:
        """Forgets all turns but the system message."""
        self._turns = list(self._opening)

    async def say(self, text: str) -> None:
        """Sends one turn and shows the answer. A turn that failed or was stopped before it had text is not kept."""
        said: list[str] = []

        def show(delta: Delta) -> None:
            said.append(delta.text)
            self._out.file.write(delta.text)
            self._out.file.flush()

        turns = [*self._turns, ChatMessage(role="user", content=text)]
        answering = asyncio.ensure_future(
            stream_answer(self._client, turns, self._options, timeout_s=self._timeout_s, on_delta=show)
        )
        try:
            with _interrupting(answering.cancel):
                answer = await answering
        except asyncio.CancelledError:
            if not answering.cancelled():
                raise
            self._err.print("\n(stopped)", style="bright_black")
        except PdmeshError as error:
            self._err.print(f"{error}", style="red", markup=False)
        else:
            self._out.file.write("\n")
            self._err.print(_cost(answer.finish), style="bright_black", markup=False)
        if said:
            self._turns = [*turns, ChatMessage(role="assistant", content="".join(said))]


@contextlib.contextmanager
def _interrupting(cancel: Callable[[], object]) -> Iterator[None]:
    """SIGINT calls `cancel` inside the block."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _cost(finish: Finish) -> str:
    usage = finish.usage
    cached = num_cached_tokens(usage.cached)
    return f"({usage.prompt_tokens:,} prompt tokens, {cached:,} of them cached; {describe_speed(finish)})"


@contextlib.contextmanager
def _waiting_for_user() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt inside the block at once. The event loop would only take note of it, for it has
    to wait until the block is left.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


async def run_chat(conversation: Conversation, *, read_line: Callable[[], str], err: Console) -> None:
    """Until the input ends. `read_line` shows the prompt, blocks, and raises EOFError at the end. Nothing else goes on
    in the meantime: there is no answer under way. Raises KeyboardInterrupt when the user interrupts that.
    """
    err.print(HELP, style="bright_black", markup=False)
    while True:
        try:
            with _waiting_for_user():
                line = read_line().strip()
        except EOFError:
            if err.is_terminal:
                # Behind the prompt.
                err.print()
            return
        except KeyboardInterrupt:
            err.print()
            raise
        match line:
            case "":
                continue
            case "/quit":
                return
            case "/new":
                conversation.begin_anew()
            case _ if line.startswith("/"):
                err.print(HELP, style="bright_black", markup=False)
            case _:
                await conversation.say(line)
