"""Command-line options and configuration files from pydantic models: one field, one option, one file key.

The field's description is the help text. A flag wins over the file, the file over the default. Knows nothing about any
particular configuration.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import json
import re
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar, Union, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from node_runtime.config import format_size, load_config
from node_runtime.errors import BadConfig

FlagValue = str | int | float | bool | list[str] | None
"""What an option delivers; None (or an empty list) when it was not given."""

FIELD_ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_batch_size": ("max_num_seqs",),
    "token_budget": ("max_num_batched_tokens",),
}
"""Names that users of other engines know; taken as flags and as file keys."""

ConfigT = TypeVar("ConfigT", bound=BaseModel)

_SCALARS: dict[object, type] = {int: int, float: float, bool: bool, str: str}


def option_name(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _bare_type(annotation: object) -> object:
    """The annotation without Annotated and without `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not types.NoneType]
        return _bare_type(members[0]) if len(members) == 1 else str
    return annotation


def _choices_of(bare: object) -> tuple[str, ...]:
    if get_origin(bare) is Literal:
        return tuple(str(choice) for choice in get_args(bare))
    if isinstance(bare, type) and issubclass(bare, enum.Enum):
        return tuple(str(member.value) for member in bare)
    return ()


def _is_repeatable(bare: object) -> bool:
    return get_origin(bare) in (list, tuple, set, frozenset)


def _option_type(bare: object, field: FieldInfo) -> object:
    """The type the option parser sees; what it does not know arrives as text and pydantic reads it."""
    if _is_repeatable(bare):
        return list[str] | None
    return (str if _has_own_syntax(field) else _SCALARS.get(bare, str)) | None


def _has_own_syntax(field: FieldInfo) -> bool:
    """Whether the field reads text that its type alone does not tell, such as 512MiB."""
    return any(isinstance(part, BeforeValidator) for part in field.metadata)


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
    is_size = bare is int and _has_own_syntax(field) and isinstance(default, int)
    if isinstance(default, float):
        return f"Default: {default:g}."
    return f"Default: {format_size(default) if is_size else default}."


def _help_of(field: FieldInfo, bare: object) -> str:
    sentences = [field.description or ""]
    if choices := _choices_of(bare):
        sentences.append(f"One of {', '.join(choices)}.")
    if _is_repeatable(bare) and "repeated" not in sentences[0]:
        sentences.append("May be repeated.")
    sentences.append(_default_text(field, bare))
    return " ".join(sentence for sentence in sentences if sentence)


def _metavar_of(field: FieldInfo, bare: object) -> str | None:
    """A name for the value where its type says too little."""
    if bare is int and _has_own_syntax(field):
        return "<size>"
    if _is_repeatable(bare):
        return "<str>"
    return "<name>" if _choices_of(bare) else None


def config_parameters(
    config_type: type[BaseModel], *, exclude: Collection[str] = (), panel_of: Callable[[str], str | None]
) -> list[inspect.Parameter]:
    """A keyword parameter per field that is not excluded: a typer option that defaults to "not given".

    Aliases follow as hidden options.
    """
    parameters = []
    for name, field in config_type.model_fields.items():
        if name not in exclude:
            parameters.append(_parameter(name, field, panel=panel_of(name), hidden=False))
    for name, aliases in FIELD_ALIASES.items():
        if name in config_type.model_fields and name not in exclude:
            field = config_type.model_fields[name]
            parameters += [_parameter(alias, field, panel=None, hidden=True) for alias in aliases]
    return parameters


def _parameter(name: str, field: FieldInfo, *, panel: str | None, hidden: bool) -> inspect.Parameter:
    bare = _bare_type(field.annotation)
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
            help="YAML or JSON file with the options below as keys (max_batch_size: 8). Flags win over it.",
        ),
    ],
)


def given(values: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
    """The options that were given on the command line."""
    return {name: value for name, value in values.items() if value is not None and value != []}


def read_config_file(path: Path, config_type: type[BaseModel]) -> dict[str, object]:
    """The file's values by field name. BadConfig when it cannot be read or holds a key that is no field."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        raise BadConfig(f"config file {path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise BadConfig(f"config file {path}: the top level must map keys to values, found {type(content).__name__}")
    return _by_field_name(
        config_type, {str(key).replace("-", "_"): value for key, value in content.items()}, f"config file {path}: key"
    )


def _by_field_name(config_type: type[BaseModel], values: Mapping[str, object], subject: str) -> dict[str, object]:
    """Aliases replaced by the field they stand for. BadConfig for unknown keys and for a field that is given twice."""
    names = {key: name for name in config_type.model_fields for key in (name, *FIELD_ALIASES.get(name, ()))}
    named: dict[str, object] = {}
    for key, value in values.items():
        name = names.get(key)
        if name is None:
            raise BadConfig(f'{subject} "{key}" is unknown{_suggestion(key, names)}')
        if name in named:
            raise BadConfig(f'{subject} "{key}" repeats "{name}"')
        named[name] = value
    return named


def _suggestion(key: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(key, names, n=1)
    return f', did you mean "{close[0]}"?' if close else f"; known keys: {', '.join(sorted(names))}"


def merged_values(
    config_type: type[BaseModel], config_file: Path | None, flags: Mapping[str, FlagValue]
) -> dict[str, object]:
    """The values of file and flags by field name, ready to be validated. BadConfig for a bad file."""
    values = read_config_file(config_file, config_type) if config_file else {}
    values.update(_by_field_name(config_type, given(flags), "option"))
    return values


def load_merged(config_type: type[ConfigT], config_file: Path | None, flags: Mapping[str, FlagValue]) -> ConfigT:
    """The checked configuration of file and flags. BadConfig names every fault, and fields by all their names."""
    values = merged_values(config_type, config_file, flags)
    try:
        return load_config(config_type, values)
    except BadConfig as error:
        names = [
            f"{name} is also called {' and '.join(aliases)}"
            for name, aliases in FIELD_ALIASES.items()
            if name in config_type.model_fields and re.search(rf"\b{name}\b", error.message)
        ]
        raise BadConfig(f"{error.message} ({', '.join(names)})" if names else error.message) from None


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
