"""Codec of the form of an output. For routers as well: it needs neither numpy nor the tokens of a model."""

from __future__ import annotations

from pdmesh.v1 import inference_pb2

from model_runtime.output_form import FormKind, OutputForm
from node_runtime.errors import InvalidRequest


def form_to_proto(form: OutputForm) -> inference_pb2.StructuredOutput:
    if form.kind is FormKind.REGEX:
        return inference_pb2.StructuredOutput(regex=form.source)
    return inference_pb2.StructuredOutput(json_schema=form.source)


def form_from_proto(message: inference_pb2.SamplingParams) -> OutputForm | None:
    """The form that sampling asks for, None for none. Raises InvalidRequest naming field and limit."""
    if not message.HasField("structured_output"):
        return None
    asked = message.structured_output
    try:
        match asked.WhichOneof("form"):
            case "json_schema":
                return OutputForm(kind=FormKind.JSON_SCHEMA, source=asked.json_schema)
            case "regex":
                return OutputForm(kind=FormKind.REGEX, source=asked.regex)
            case _:
                raise InvalidRequest("sampling.structured_output: one of json_schema and regex is required")
    except ValueError as error:
        raise InvalidRequest(f"sampling.structured_output.{error}") from None
