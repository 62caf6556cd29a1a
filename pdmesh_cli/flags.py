"""Command-line options from pydantic models: one field, one option, one variable, one file key.

The field's description is the help text. A flag wins over the environment, that over the file, the file over
the default. Knows nothing about any particular configuration.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from node_runtime.config import FIELD_ALIASES, bare_type, format_size, has_own_syntax, is_repeatable, is_secret
from node_runtime.config_sources import (
    FILE_FORMATS,
    Given,
    Resolved,
    by_field_name,
    read_config_file,
    read_environment,
    resolve,
)

FlagValue = str | int | float | bool | list[str] | None
"""What an option delivers; None (or an empty list) when it was not given."""

ConfigT = TypeVar("ConfigT", bound=BaseModel)

_SCALARS: dict[object, type] = {int: int, float: float, bool: bool, str: str}


def option_name(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _choices_of(bare: object) -> tuple[str, ...]:
    if get_origin(bare) is Literal:
        return tuple(str(choice) for choice in get_args(bare))
    if isinstance(bare, type) and issubclass(bare, enum.Enum):
        return tuple(str(member.value) for member in bare)
    return ()


def _option_type(bare: object, field: FieldInfo) -> object:
    """The type the option parser sees; what it does not know arrives as text and pydantic reads it."""
    if is_repeatable(field):
        return list[str] | None
    return (str if has_own_syntax(field) else _SCALARS.get(bare, str)) | None


def _default_text(field: FieldInfo, bare: object) -> str:
    """The default as a user would write it; empty when there is none or the description has to explain it."""
    default = field.default
    if field.is_required():
        return "Required."
    if default is None or default is PydanticUndefined or default in ("", ()):
        return ""
    if isinstance(default, bool):
        return f"Default: {'on' if default else 'off'}."
    if isinstance(default, enum.Enum):
        return f"Default: {default.value}."
    is_size = bare is int and has_own_syntax(field) and isinstance(default, int)
    if isinstance(default, float):
        return f"Default: {default:g}."
    return f"Default: {format_size(default) if is_size else default}."


def _help_of(field: FieldInfo, bare: object) -> str:
    sentences = [field.description or ""]
    if choices := _choices_of(bare):
        sentences.append(f"One of {', '.join(choices)}.")
    if is_repeatable(field) and "repeated" not in sentences[0]:
        sentences.append("May be repeated.")
    sentences.append(_default_text(field, bare))
    return " ".join(sentence for sentence in sentences if sentence)


def _metavar_of(field: FieldInfo, bare: object) -> str | None:
    """A name for the value where its type says too little."""
    if bare is int and has_own_syntax(field):
        return "<size>"
    if is_repeatable(field):
        return "<str>"
    return "<name>" if _choices_of(bare) else None


def config_parameters(
    config_type: type[BaseModel], *, exclude: Collection[str] = (), panel_of: Callable[[str], str | None]
) -> list[inspect.Parameter]:
    """A keyword parameter per field that is not excluded: a typer option that defaults to "not given".

    Aliases follow as hidden options. A secret has no option: a command line can be read by everybody on the machine.
    """
    parameters = []
    for name, field in config_type.model_fields.items():
        if name not in exclude and not is_secret(field):
            parameters.append(_parameter(name, field, panel=panel_of(name), hidden=False))
    for name, aliases in FIELD_ALIASES.items():
        if name in config_type.model_fields and name not in exclude:
            field = config_type.model_fields[name]
            parameters += [_parameter(alias, field, panel=None, hidden=True) for alias in aliases]
    return parameters


def _parameter(name: str, field: FieldInfo, *, panel: str | None, hidden: bool) -> inspect.Parameter:
    bare = bare_type(field.annotation)
    flag = option_name(name)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if bare is bool else flag,
        help=_help_of(field, bare),
        show_default=False,
        metavar=_metavar_of(field, bare),
        rich_help_panel=panel,
        hidden=hidden,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[_option_type(bare, field), option]
    )


CONFIG_FILE_PARAMETER = inspect.Parameter(
    "config_file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="<file>",
            help=f"{FILE_FORMATS} file with the options below as keys (max_batch_size: 8). Flags win over "
            "variables of the environment (PDMESH_MAX_BATCH_SIZE), and these over the file.",
        ),
    ],
)


def take_parameters(command: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> None:
    """Gives `command`, which takes whatever it is called with, the parameters that typer is to offer."""
    # No function is declared to have a signature, yet `inspect` documents the attribute for this.
    command.__signature__ = inspect.Signature([*parameters])  # type: ignore[attr-defined]
    command.__annotations__ = {}


def given(values: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
    """The options that were given on the command line."""
    return {name: value for name, value in values.items() if value is not None and value != []}


def layers_of(
    config_type: type[BaseModel],
    config_file: Path | None,
    flags: Mapping[str, FlagValue],
    environment: Mapping[str, str],
    *,
    role: str = "",
) -> tuple[Mapping[str, Given], ...]:
    """What file, environment and flags say, by field name, the last winning. Raises BadConfig for a wrong name."""
    named_flags = {name: Given(value=value, origin=option_name(name)) for name, value in given(flags).items()}
    return (
        read_config_file(config_file, config_type, role=role) if config_file else {},
        read_environment(config_type, environment),
        by_field_name(config_type, named_flags, "option"),
    )


def load_merged(
    config_type: type[ConfigT],
    config_file: Path | None,
    flags: Mapping[str, FlagValue],
    environment: Mapping[str, str],
    *,
    role: str = "",
) -> Resolved[ConfigT]:
    """The checked configuration of file, environment and flags. BadConfig names every fault."""
    return resolve(config_type, *layers_of(config_type, config_file, flags, environment, role=role))


def flags_for(values: Mapping[str, FlagValue]) -> list[str]:
    """The command-line arguments that give these values to another pdmesh process."""
    arguments: list[str] = []
    for name, value in given(values).items():
        flag = option_name(name)
        if isinstance(value, bool):
            arguments.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            arguments.extend(f"{flag}={each}" for each in value)
        else:
            arguments.append(f"{flag}={value}")
    return arguments
