"""What a form allows token by token, and what is refused instead of being compiled for ever."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from support.byte_tokenizer import END_TOKEN, make_tokenizer

from model_runtime.output_form import MAX_FORM_BYTES, FormKind, OutputForm
from model_runtime.text.grammar import FormError, GrammarCompiler, TokenMatcher, check_form

VOCAB_SIZE = 260
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "ages": {"type": "array", "items": {"enum": [1, 22]}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}


def _regex(source: str) -> OutputForm:
    return OutputForm(kind=FormKind.REGEX, source=source)


def _schema(schema: object) -> OutputForm:
    return OutputForm(kind=FormKind.JSON_SCHEMA, source=json.dumps(schema))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(make_tokenizer(), vocab_size=VOCAB_SIZE)


def _allowed(matcher: TokenMatcher) -> set[int]:
    return set(np.flatnonzero(matcher.allowed()).tolist())


def _walk(matcher: TokenMatcher, seed: int) -> bytes:
    """Some text that the matcher allows, to its end."""
    draw, text = random.Random(seed), bytearray()
    for _ in range(2000):
        token_id = draw.choice(sorted(_allowed(matcher)))
        matcher.accept([token_id])
        if token_id == END_TOKEN:
            return bytes(text)
        text.append(token_id)
    raise AssertionError(f"no end: {bytes(text)!r}")


def test_an_expression_allows_what_can_still_match_and_an_end_where_it_does(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(_regex("ab?|c"))
    assert matcher.allowed().shape == (VOCAB_SIZE,)
    assert _allowed(matcher) == {ord("a"), ord("c")}
    matcher.accept([ord("a")])
    assert _allowed(matcher) == {ord("b"), END_TOKEN}
    matcher.accept([ord("b")])
    assert _allowed(matcher) == {END_TOKEN}


@pytest.mark.parametrize("seed", range(5))
def test_any_allowed_walk_through_a_schema_is_json_that_it_allows(compiler: GrammarCompiler, seed: int) -> None:
    value = json.loads(_walk(compiler.compile(_schema(SCHEMA)), seed))
    assert set(value) == {"name", "ages"}
    assert len(value["name"]) <= 4
    assert set(value["ages"]) <= {1, 22}


def test_white_space_cannot_go_on_for_ever(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(_schema({"type": "object", "x-guidance": {"whitespace_pattern": " {1,1000}"}}))
    matcher.accept(b"{" + b" " * 32)
    assert ord(" ") not in _allowed(matcher)


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_matcher_made_anew_for_the_tokens_so_far_goes_on_alike(compiler: GrammarCompiler, cut: int) -> None:
    text = b'{"name": "x"'
    first = compiler.compile(_schema(SCHEMA))
    first.accept(text[:cut])
    fork, again = first.fork(), compiler.compile(_schema(SCHEMA))
    again.accept(text[:cut])
    first.accept(text[cut:])
    assert _allowed(fork) == _allowed(again)
    fork.accept(text[cut:])
    assert _allowed(fork) == _allowed(first)


def test_tokens_that_leave_the_form_are_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(FormError, match="regex: "):
        compiler.compile(_regex("[a-z]+")).accept(b"a1")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (_regex("(a"), r"regex: .*unclosed group"),
        (_regex("(?=a)b"), r"regex: .*look-around"),
        (OutputForm(kind=FormKind.JSON_SCHEMA, source="{"), "json_schema: "),
        (_schema(3), "json_schema: Expecting object schema"),
        (_schema({"type": "colour"}), "json_schema: Invalid type: colour"),
        (_schema({"not": {"type": "string"}}), 'json_schema: Unimplemented keys: \\["not"\\]'),
        (_schema({"$ref": "http://somewhere/else"}), "json_schema: .*http://somewhere/else"),
        (_schema({"type": "string", "pattern": "("}), "json_schema: .*unclosed group"),
        (
            _schema({"allOf": [{"anyOf": [{"properties": {f"{i}_{j}": {}}} for i in range(5)]} for j in range(12)]}),
            "json_schema: .*too large",
        ),
        (OutputForm(kind=FormKind.JSON_SCHEMA, source='{"items":' * 500 + "{}" + "}" * 500), "json_schema: "),
    ],
)
def test_what_is_no_form_or_too_much_of_one_is_refused_in_one_line(
    compiler: GrammarCompiler, form: OutputForm, words: str
) -> None:
    for check in (check_form, compiler.compile):
        with pytest.raises(FormError, match=words) as caught:
            check(form)
        assert "\n" not in str(caught.value)


def test_a_form_is_bounded_in_size() -> None:
    with pytest.raises(ValueError, match=f"regex: {MAX_FORM_BYTES + 1} bytes given, 1 to {MAX_FORM_BYTES} allowed"):
        _regex("a" * (MAX_FORM_BYTES + 1))
    with pytest.raises(ValueError, match="regex: 0 bytes given"):
        _regex("")


def test_the_largest_forms_still_compile(compiler: GrammarCompiler) -> None:
    assert _walk(compiler.compile(_regex("a" * 1900)), 0) == b"a" * 1900
    properties = {f"key{index}": {"type": "string", "pattern": "^(a|b){1,20}$"} for index in range(900)}
    assert compiler.compile(_schema({"type": "object", "properties": properties})).allowed().any()


def test_special_tokens_and_tokens_without_text_are_never_allowed(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(_regex("(?s).*"))
    assert _allowed(matcher) <= {*range(256), END_TOKEN}
    assert re.fullmatch(r"(?s).*", _walk(matcher, 3).decode())


def test_a_model_without_an_end_token_can_have_no_forms() -> None:
    tokenizer = make_tokenizer()

    class Endless(type(tokenizer)):  # type: ignore[misc]
        eos_token_ids = ()

    with pytest.raises(FormError, match="no end token"):
        GrammarCompiler(Endless(tokenizer._model), vocab_size=VOCAB_SIZE)
