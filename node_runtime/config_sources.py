"""Where the values of a configuration come from: a file and the environment here, flags from whoever has them.

Precedence is the order in which layers are given to `resolve`. Knows no particular configuration and no command line.
In a file every key must be known. The environment is shared with others (Kubernetes adds PDMESH_... variables for a
Service called pdmesh): a variable that is nearly an option is refused, any other that is none is left alone.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import yaml
from pydantic import BaseModel

from node_runtime.config import FIELD_ALIASES, is_repeatable, load_config
from node_runtime.errors import BadConfig

ENVIRONMENT_PREFIX = "PDMESH_"
ROLE_KEY = "role"
DEFAULT_ORIGIN = "default"
FILE_FORMATS = "YAML, TOML (.toml) or JSON (.json)"

# How alike a variable must be to an option to be taken for a misspelling of it.
_MISSPELLING_RATIO = 0.8
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")

ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One value as it was given, and where: `--port`, `PDMESH_PORT`, or the name of a file."""

    value: object
    origin: str


Layer: TypeAlias = Mapping[str, Given]
"""Given values by field name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[ConfigT]):
    """A checked configuration, and where each field that was given came from."""

    config: ConfigT
    origins: Mapping[str, str]


def resolve(config_type: type[ConfigT], *layers: Layer) -> Resolved[ConfigT]:
    """The configuration of all layers; a later one wins. Raises BadConfig naming every key at fault, where it was
    given, its value and the limit.
    """
    merged: dict[str, Given] = {}
    for layer in layers:
        merged.update(layer)
    origins = {name: given.origin for name, given in merged.items()}
    config = load_config(config_type, {name: given.value for name, given in merged.items()}, origins=origins)
    return Resolved(config=config, origins=origins)


def read_environment(config_type: type[BaseModel], environment: Mapping[str, str]) -> dict[str, Given]:
    """What the variables PDMESH_FIELD say; empty ones say nothing, and lists are separated by commas.

    Raises BadConfig for a misspelled variable and for a field that is given under two names.
    """
    names = _names_of(config_type)
    variables: dict[str, Given] = {}
    for variable in sorted(environment):
        text = environment[variable]
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not variable.startswith(ENVIRONMENT_PREFIX) or not text or _SERVICE_LINK.match(text):
            continue
        if key in names:
            field = config_type.model_fields[names[key]]
            value = [part.strip() for part in text.split(",") if part.strip()] if is_repeatable(field) else text
            variables[key] = Given(value=value, origin=variable)
        elif close := difflib.get_close_matches(key, names, n=1, cutoff=_MISSPELLING_RATIO):
            raise BadConfig(f"environment: {variable} is unknown, did you mean {ENVIRONMENT_PREFIX}{close[0].upper()}?")
    return by_field_name(config_type, variables, "environment:")


def read_config_file(path: Path, config_type: type[BaseModel], *, role: str = "") -> dict[str, Given]:
    """The file's values. Raises BadConfig when it cannot be read, has an unknown or repeated key, or says that it is
    for another role than `role`.
    """
    content = parse_config_file(path)
    stated_role = content.pop(ROLE_KEY, None)
    if stated_role is not None and stated_role != role:
        raise BadConfig(f"config file {path}: {ROLE_KEY}: {stated_role!r} given, this is a {role or 'node'}")
    values = {key: Given(value=value, origin=str(path)) for key, value in content.items()}
    return by_field_name(config_type, values, f"config file {path}: key")


def parse_config_file(path: Path) -> dict[str, object]:
    """The top-level keys of the file, with `-` and `_` the same, and their values. Raises BadConfig."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadConfig(f"config file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadConfig(f"config file {path}: {error}") from error
    try:
        content = _parse(text, path.suffix)
    except yaml.MarkedYAMLError as error:
        # Its own text quotes the line, which may hold a secret.
        mark = error.problem_mark
        place = f" in line {mark.line + 1}" if mark else ""
        what = " ".join(filter(None, (error.context, error.problem)))
        raise BadConfig(f"config file {path}: {what}{place}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise BadConfig(f"config file {path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise BadConfig(f"config file {path}: the top level must map keys to values, found {type(content).__name__}")
    keys: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in keys:
            raise BadConfig(f'config file {path}: key "{name}" is given twice')
        keys[name] = value
    return keys


def _parse(text: str, suffix: str) -> object:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text, object_pairs_hook=_unique_keys)
    return yaml.load(text, Loader=_StrictLoader)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Raises ValueError for a key that is given twice."""
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f'key "{key}" is given twice')
    return dict(pairs)


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'key "{key_node.value}" is given twice', key_node.start_mark
                )
            seen.add(key_node.value)
        return dict(super().construct_mapping(node, deep))


def by_field_name(config_type: type[BaseModel], values: Layer, subject: str) -> dict[str, Given]:
    """Aliases replaced by the field they stand for. BadConfig for unknown keys and for a field that is given twice."""
    names = _names_of(config_type)
    named: dict[str, Given] = {}
    for key, given in values.items():
        name = names.get(key)
        if name is None:
            raise BadConfig(f'{subject} "{key}" is unknown{nearest_name(key, names)}')
        if name in named:
            raise BadConfig(f'{subject} "{key}" repeats "{name}"')
        named[name] = given
    return named


def nearest_name(key: str, names: Collection[str]) -> str:
    """The end of a message about an unknown key."""
    close = difflib.get_close_matches(key, names, n=1)
    return f', did you mean "{close[0]}"?' if close else f"; known keys: {', '.join(sorted(names))}"


def _names_of(config_type: type[BaseModel]) -> dict[str, str]:
    """Field name by every name that the field has."""
    return {key: name for name in config_type.model_fields for key in (name, *FIELD_ALIASES.get(name, ()))}
