"""Messages and tools of a chat, as clients of the OpenAI API send them and as a model's template takes them."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pdmesh.v1 import inference_pb2
from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue

from router_node.json_text import read_json


class StrictModel(BaseModel):
    """A value whose fields are all known and of exactly their types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _as_parts(value: object) -> object:
    """A string stands for one part of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(StrictModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Function(StrictModel):
    """A tool that the model may call, as its template takes it: `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """One of `tools`."""

    type: Literal["function"]
    function: Function

    def to_json(self) -> str:
        return json.dumps(self.model_dump(exclude_none=True), ensure_ascii=False)


class NamedFunction(StrictModel):
    """The function that is to be called."""

    name: str


def _as_choice(value: object) -> object:
    """A word stands for a choice of that type; the name of a function has no word of its own."""
    return {"type": value} if isinstance(value, str) and value != "function" else value


class ToolChoice(StrictModel):
    """Whether the model may call tools, must call one, or which."""

    type: Literal["auto", "none", "required", "function"]
    function: NamedFunction | None = None


Choice = Annotated[ToolChoice, BeforeValidator(_as_choice)]


class CalledFunction(StrictModel):
    """Which function a model called. `arguments` are JSON text in the API, and values for templates."""

    name: str
    arguments: str

    def for_template(self) -> dict[str, JsonValue]:
        try:
            arguments = read_json(self.arguments or "{}")
        except ValueError:
            # A model that does not write JSON is shown what it wrote.
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(StrictModel):
    """One of the calls that an earlier turn of the model made."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    def to_json(self) -> str:
        call = {"id": self.id, "type": self.type, "function": self.function.for_template()}
        return json.dumps(call, ensure_ascii=False)


class Message(StrictModel):
    """One turn of a chat. What roles there are and what the turns may hold is for the service to say."""

    role: str
    content: Annotated[list[TextPart] | None, BeforeValidator(_as_parts)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What clients send back of an answer that they got.
    refusal: None = None

    def to_proto(self) -> inference_pb2.ChatMessage:
        return inference_pb2.ChatMessage(
            # What newer clients call the one that instructs.
            role="system" if self.role == "developer" else self.role,
            content="\n".join(part.text for part in self.content or ()),
            tool_calls_json=[call.to_json() for call in self.tool_calls or ()],
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
        )
