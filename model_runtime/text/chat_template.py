"""Renders chat messages with the template that a model brings along.

The template comes out of a model file and is not trusted: it runs in jinja's immutable sandbox. The result is text in
which the model's special tokens are spelled out; it is to be tokenised without adding further ones. The environment
(whitespace control, `raise_exception`, `strftime_now`, `tojson`, loop controls, generation blocks) is the one that
templates are written for.

Source: chat templates as documented by the transformers library, "Chat templates".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

from jinja2 import Environment, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Name, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model_runtime.text.errors import ChatTemplateError

ROLES = ("system", "user", "assistant", "tool")


# A value of JSON, for the template to walk through.
JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn. `role` is one of ROLES; the template sees the other fields where they are not empty."""

    role: str
    content: str
    tool_calls: tuple[JsonObject, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role: {self.role!r} is not one of {', '.join(ROLES)}")

    def for_template(self) -> dict[str, object]:
        """The message under the names that templates are written for."""
        optional = {"tool_calls": list(self.tool_calls), "tool_call_id": self.tool_call_id, "name": self.name}
        given = {name: value for name, value in optional.items() if value}
        return {"role": self.role, "content": self.content, **given}


class ChatTemplate:
    """A compiled template. Immutable and safe to share between threads."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`now` answers `strftime_now`, by which some templates date their system prompt. `shows_tools` says afterwards
        whether the template does anything with tools.

        Raises ChatTemplateError for a template that does not compile.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from error
        self.shows_tools = any(name.name == "tools" for name in parsed.find_all(Name))
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] = ()) -> str:
        """The prompt for the assistant's next turn. Raises ChatTemplateError with the template's own reason.

        A template that knows no tools does not mention them; without tools it is not told of any.
        """
        try:
            return self._template.render(
                messages=[message.for_template() for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=True,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        # Beyond jinja's own errors a template fails like any program: wrong types, missing keys, division by zero.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error


class _GenerationBlocks(Extension):
    """Accepts `{% generation %}` blocks, which only mark the assistant's own tokens for training."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter it leaves HTML characters alone."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
