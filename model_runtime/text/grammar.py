"""Which tokens may follow, so that a completion gets the form that was asked for. Only this module imports llguidance.

A matcher is a function of the form and the tokens so far, and of nothing else: it can be made anew wherever a request
goes on. Both compiling and matching are bounded by counted work, not by time. Knows no request and no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import llguidance
import numpy as np
import numpy.typing as npt

from model_runtime.output_form import FormKind, OutputForm
from model_runtime.text.tokenizer import Tokenizer

AllowedTokens = npt.NDArray[np.bool_]

# Steps of the library's lexer and symbols of its parser; what fits is compiled in well under a second.
_LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000, max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False
)
# Without a bound small models go on with spaces for ever.
_WHITE_SPACE: Final = "[ \\n\\t]{1,32}"
_MAX_REASON_CHARACTERS: Final = 300


class FormError(ValueError):
    """The form is none, or asks for more than the limits allow. The message begins with the name of its kind."""


def check_form(form: OutputForm) -> None:
    """Raises FormError. Needs no tokenizer; the largest forms take up to a second."""
    is_bad, messages = llguidance.LLMatcher.validate_grammar_with_warnings(_grammar(form), limits=_LIMITS)
    if is_bad:
        raise _refusal(form, messages[0])


class GrammarCompiler:
    """Makes matchers for one vocabulary. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        """`vocab_size`: entries of the model's logits, which may be more than the tokenizer has tokens.

        Takes a second for a large vocabulary. Raises FormError for a model without an end token.
        """
        if not tokenizer.eos_token_ids:
            raise FormError("the model has no end token, without which no form is ever complete")
        self._vocab_size = vocab_size
        self._end_token_ids = frozenset(tokenizer.eos_token_ids)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=list(tokenizer.eos_token_ids)
        )

    def compile(self, form: OutputForm) -> TokenMatcher:
        """A matcher in front of the first token. Raises FormError."""
        matcher = llguidance.LLMatcher(self._tokenizer, _grammar(form), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refusal(form, matcher.get_error())
        return TokenMatcher(form, matcher, vocab_size=self._vocab_size, end_token_ids=self._end_token_ids)


class TokenMatcher:
    """What may follow one sequence of tokens. Belongs to one request; one thread at a time."""

    __slots__ = ("_end_token_ids", "_form", "_matcher", "_vocab_size")

    def __init__(
        self, form: OutputForm, matcher: llguidance.LLMatcher, *, vocab_size: int, end_token_ids: frozenset[int]
    ) -> None:
        self._form = form
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids

    def fork(self) -> TokenMatcher:
        """Another one in the same place."""
        copy = self._matcher.deep_copy()
        return TokenMatcher(self._form, copy, vocab_size=self._vocab_size, end_token_ids=self._end_token_ids)

    def allowed(self) -> AllowedTokens:
        """bool[vocab_size], some of them True: once the form is complete and cannot go on, the end tokens alone.

        Raises FormError when the form turns out to need more work than the limits allow.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise _refusal(self._form, self._matcher.get_error())
        bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size]
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        allowed[: bits.size] = bits
        return allowed

    def accept(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these. Raises FormError, after which the matcher is of no use, if it must not."""
        for token_id in token_ids:
            # The library is told of an end only where something else could have followed.
            is_end = self._matcher.is_stopped() and token_id in self._end_token_ids
            if not is_end and not self._matcher.consume_token(token_id):
                raise _refusal(self._form, self._matcher.get_error())


class _Vocabulary:
    """A tokenizer as the library wants to see one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        # No text leads to these, so no form does either.
        self.special_token_ids = [token_id for token_id, content in enumerate(self.tokens) if not content]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _grammar(form: OutputForm) -> str:
    """Raises FormError for text that is no JSON object."""
    if form.kind is FormKind.REGEX:
        return llguidance.LLMatcher.grammar_from_regex(form.source)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            form.source, overrides={"whitespace_pattern": _WHITE_SPACE}
        )
    except ValueError as error:
        raise _refusal(form, str(error)) from None


def _refusal(form: OutputForm, reason: str) -> FormError:
    """In one line: what the library adds about its own grammar tells the client nothing."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    return FormError(f"{form.kind.value}: {line[:_MAX_REASON_CHARACTERS]}")
