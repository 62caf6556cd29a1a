"""Forms of outputs on their way to the engine: compiled beside it, on a thread of their own.

The engine thread and the event loop never wait for a compiler. The vocabulary is read when the first request asks for a
form. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from node_runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from model_runtime.output_form import OutputForm
    from model_runtime.text.grammar import GrammarCompiler, TokenMatcher

# Clients repeat the schemas of their application.
_NUM_KEPT: Final = 32
FORM_FIELD: Final = "sampling.structured_output"


class OutputForms:
    """The compiler of one node, and what it compiled lately."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        """`make_compiler` is called once, on the thread, and raises ValueError when the model cannot have forms."""
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None
        self._compiled: OrderedDict[OutputForm, TokenMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="output-forms")

    async def matcher(self, form: OutputForm | None, output_token_ids: Sequence[int]) -> TokenMatcher | None:
        """What restricts the tokens behind `output_token_ids`, the completion so far; None for no form.

        Raises InvalidRequest naming the field, for a form that is none or that the output so far has left.
        """
        if form is None:
            return None
        event_loop = asyncio.get_running_loop()
        try:
            return await event_loop.run_in_executor(self._thread, self._make, form, tuple(output_token_ids))
        except ValueError as error:
            raise InvalidRequest(f"{FORM_FIELD}.{error}") from None

    def close(self) -> None:
        """Drops what waits; does not wait for what runs."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, form: OutputForm, output_token_ids: tuple[int, ...]) -> TokenMatcher:
        """On the thread, which alone touches what is kept."""
        if form in self._compiled:
            self._compiled.move_to_end(form)
        else:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            self._compiled[form] = self._compiler.compile(form)
            if len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
        matcher = self._compiled[form].fork()
        matcher.accept(output_token_ids)
        return matcher


def compiler_for(model_path: str, vocab_size: int) -> Callable[[], GrammarCompiler]:
    """For the model at `model_path`, whose files hold its vocabulary."""

    def make() -> GrammarCompiler:
        from model_runtime.text.grammar import GrammarCompiler
        from model_runtime.text.tokenizer import load_tokenizer

        return GrammarCompiler(load_tokenizer(model_path), vocab_size=vocab_size)

    return make
