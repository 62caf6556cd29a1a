"""Calls of tools: the form that makes a model write one, and the calls in a text that it wrote.

Knows the two ways in which most templates have models write: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`,
and one such object, or a list of them, as the whole text. Without I/O; one reader per sample.

Source: Hermes function calling, github.com/NousResearch/Hermes-Function-Calling; the templates of Qwen and Llama 3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from pydantic import JsonValue

from router_node.json_text import read_json
from router_node.openai_api.chat_messages import Function

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
# What models are taught to call the arguments.
_ARGUMENTS: Final = ("arguments", "parameters")
# Of a forced call, up to the first character of its arguments.
_BEGINNING: Final = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCall:
    """A call that the model made. `arguments` is JSON text, as the API has it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreArguments:
    """What the arguments of the call before it go on with."""

    text: str


Found: TypeAlias = str | FoundCall | MoreArguments
"""Text for the reader of the answer, or a call, or more of one."""


# Of a reader that tells calls when they are whole.
_Whole: TypeAlias = str | FoundCall


def joined(found: Iterable[Found]) -> list[Found]:
    """The same with calls and what follows of their arguments as one."""
    parts: list[Found] = []
    for part in found:
        last = parts[-1] if parts else None
        if isinstance(part, MoreArguments) and isinstance(last, FoundCall):
            parts[-1] = FoundCall(name=last.name, arguments=last.arguments + part.text)
        elif isinstance(part, MoreArguments) and isinstance(last, MoreArguments):
            parts[-1] = MoreArguments(text=last.text + part.text)
        else:
            parts.append(part)
    return parts


class CallReader(Protocol):
    """Takes the text of one sample piece by piece and says what in it is text and what a call."""

    @property
    def num_calls(self) -> int:
        """Calls that were found by now."""
        ...

    def feed(self, text: str) -> Sequence[Found]:
        """What is known of the text with this piece of it."""
        ...

    def finish(self) -> Sequence[Found]:
        """What was held back, at the end of the text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """How the calls of an answer are found. `names` are those of the tools; without `takes_several` only the first call
    counts. `is_forced`: the text has the form of `forced_call_schema`.
    """

    names: frozenset[str]
    takes_several: bool = True
    is_forced: bool = False

    def reader(self) -> CallReader:
        """For one sample."""
        if self.is_forced:
            return ForcedCallReader()
        return FreeCallReader(self.names, takes_several=self.takes_several)


def forced_call_schema(functions: Sequence[Function]) -> str:
    """JSON schema of one call of one of these functions, as the text of an answer."""
    definitions: dict[str, JsonValue] = {}
    calls: list[dict[str, JsonValue]] = []
    for index, function in enumerate(functions):
        name = f"arguments_{index}"
        definitions[name] = _moved_below(f"#/$defs/{name}", function.parameters or {"type": "object", "properties": {}})
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": {"$ref": f"#/$defs/{name}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    form: Mapping[str, object] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return json.dumps({"$defs": definitions, **form}, ensure_ascii=False)


def _moved_below(root: str, schema: JsonValue) -> JsonValue:
    """The schema with its references into itself as they are when it lies at `root`."""
    if isinstance(schema, list):
        return [_moved_below(root, part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, JsonValue] = {}
    for key, value in schema.items():
        is_own = key == "$ref" and isinstance(value, str) and value.startswith("#")
        moved[key] = f"{root}{str(value)[1:]}" if is_own else _moved_below(root, value)
    return moved


class FreeCallReader:
    """Of a model that may call or not. Text that may turn out to be a call is held back until that is known; what only
    looks like a call is text.
    """

    def __init__(self, names: Iterable[str], *, takes_several: bool) -> None:
        self._names = frozenset(names)
        self._takes_several = takes_several
        self._held = ""
        # Pieces behind it that told nothing new. They are put together once, however many there are.
        self._later: list[str] = []
        self._has_begun = False
        # An object or a list: only its end says what it is.
        self._may_be_whole = False
        self._awaits_close = False
        # Of what was fed by now, where the mark that is awaited may begin.
        self._last_characters = ""
        self._num_calls = 0
        # None where the last thing that was found is text.
        self._space_behind_call: str | None = None

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def feed(self, text: str) -> list[_Whole]:
        tells = self._tells_something(text)
        self._later.append(text)
        if not tells:
            return []
        self._put_together()
        if not self._has_begun:
            self._may_be_whole = self._held.lstrip()[:1] in ("{", "[")
            if self._may_be_whole:
                return []
            self._has_begun = True
        found: list[_Whole] = []
        while (part := self._next_part()) is not None:
            found.append(part)
        return self._counted(found)

    def finish(self) -> list[_Whole]:
        self._put_together()
        rest, self._held = self._held, ""
        if not rest:
            return []
        calls = [] if self._has_begun else self._calls_in(rest)
        return self._counted(calls or [rest])

    def _tells_something(self, text: str) -> bool:
        """Whether more is known with this piece than without it."""
        if self._may_be_whole:
            return False
        if not self._has_begun:
            return bool(text.strip())
        if not self._awaits_close:
            return True
        seen = self._last_characters + text
        self._last_characters = seen[1 - len(_CLOSE) :]
        return _CLOSE in seen

    def _put_together(self) -> None:
        self._held += "".join(self._later)
        self._later.clear()

    def _next_part(self) -> _Whole | None:
        begin = self._held.find(_OPEN)
        if begin < 0:
            keep = _overlap(self._held, _OPEN)
            num_known = len(self._held) - keep
            return None if keep and not self._held[:num_known].strip() else self._cut(num_known)
        if self._held[:begin].strip():
            return self._cut(begin)
        end = self._held.find(_CLOSE, begin)
        self._awaits_close = end < 0
        if self._awaits_close:
            self._last_characters = self._held[1 - len(_CLOSE) :]
            return None
        call = _call_of(_parsed(self._held[begin + len(_OPEN) : end]))
        block = self._cut(end + len(_CLOSE))
        # Space in front of a call is no text, in front of what only looks like one it is.
        return block if call is None else call

    def _cut(self, num_characters: int) -> str | None:
        text, self._held = self._held[:num_characters], self._held[num_characters:]
        return text or None

    def _calls_in(self, text: str) -> list[_Whole]:
        """Those that the whole text is: of known tools, or it is an answer in JSON."""
        value = _parsed(text)
        calls = [_call_of(each) for each in (value if isinstance(value, list) else [value])]
        known = [call for call in calls if call is not None and call.name in self._names]
        return list(known) if len(known) == len(calls) else []

    def _counted(self, found: Sequence[_Whole]) -> list[_Whole]:
        """Behind a call space is no text, and where one is wanted further ones are left out."""
        kept: list[_Whole] = []
        for part in found:
            if isinstance(part, FoundCall):
                self._space_behind_call = ""
                if self._takes_several or not self._num_calls:
                    self._num_calls += 1
                    kept.append(part)
            elif self._space_behind_call is None:
                kept.append(part)
            elif part.strip():
                kept.append(self._space_behind_call + part)
                self._space_behind_call = None
            else:
                self._space_behind_call += part
        return kept


class ForcedCallReader:
    """Of a model that writes one call and nothing else: its arguments are told as they come."""

    def __init__(self) -> None:
        self._held = ""
        self._num_calls = 0
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._is_complete = False

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def feed(self, text: str) -> list[Found]:
        if self._num_calls:
            arguments = self._arguments_in(text)
            return [MoreArguments(text=arguments)] if arguments else []
        self._held += text
        begun = _BEGINNING.match(self._held)
        if begun is None:
            return []
        rest, self._held = self._held[begun.end() :], ""
        self._num_calls = 1
        return [FoundCall(name=json.loads(begun["name"]), arguments=self._arguments_in(rest))]

    def finish(self) -> list[Found]:
        # Where it was cut off before anything is known of the call.
        rest, self._held = self._held, ""
        return [rest] if rest else []

    def _arguments_in(self, text: str) -> str:
        """The part in front of the brace that ends the call."""
        for place, character in enumerate(text):
            if self._is_complete or self._ends_call(character):
                self._is_complete = True
                return text[:place]
        return text

    def _ends_call(self, character: str) -> bool:
        if self._is_in_string:
            self._is_in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return self._depth < 0


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((length for length in range(len(mark) - 1, 0, -1) if text.endswith(mark[:length])), 0)


def _parsed(text: str) -> JsonValue:
    """None for what is no JSON."""
    try:
        return read_json(text)
    except ValueError:
        return None


def _call_of(value: JsonValue) -> FoundCall | None:
    """None for what is no call."""
    if not isinstance(value, Mapping):
        return None
    name = value.get("name")
    arguments = next((value[key] for key in _ARGUMENTS if key in value), {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
        return None
    # Some models write the arguments as the API has them.
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return FoundCall(name=name, arguments=text)
