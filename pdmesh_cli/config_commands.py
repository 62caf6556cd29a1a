"""`pdmesh config check|show|schema`: what a node would make of a file, the environment and options.

Starts nothing. Knows the configuration of every role, and nothing of what the roles do with it.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ParamSpec

import typer
import yaml
from pydantic import SecretStr
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from decode_node.config import DecodeNodeConfig, FusedNodeConfig
from node_runtime.config import FIELD_ALIASES, NodeConfig, format_size, has_own_syntax, parse_size
from node_runtime.config_sources import DEFAULT_ORIGIN, FILE_FORMATS, ROLE_KEY, Resolved, parse_config_file
from node_runtime.errors import BadConfig
from pdmesh_cli.failures import reported_failures
from pdmesh_cli.flags import CONFIG_FILE_PARAMETER, FlagValue, config_parameters, load_merged, take_parameters
from prefill_node.config import PrefillNodeConfig
from router_node.config import RouterConfig

ROLE_CONFIGS: Mapping[str, type[NodeConfig]] = {
    config_type.role_name: config_type
    for config_type in (RouterConfig, PrefillNodeConfig, DecodeNodeConfig, FusedNodeConfig)
}
HIDDEN = "***"
_MAX_ALIGNED = 48
_MUST_AGREE = ("dtype", "prefix_granularity", "weight_version")
# Of a command that leaves the options of a role to `resolve_arguments`.
_TAKES_ROLE_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}

Parameters = ParamSpec("Parameters")

_FileArgument = Annotated[list[Path], typer.Argument(metavar="<file>...", help=f"{FILE_FORMATS} files.")]
_Role = Annotated[
    str,
    typer.Option(
        metavar="<name>",
        help=f"One of {', '.join(ROLE_CONFIGS)}. Default: what the file says under role.",
        show_default=False,
    ),
]


def config_type_of(role: str) -> type[NodeConfig]:
    """Raises BadConfig for a role that does not exist."""
    config_type = ROLE_CONFIGS.get(role)
    if not role:
        raise BadConfig(f"role: required, one of {', '.join(ROLE_CONFIGS)}: --role decode")
    if config_type is None:
        raise BadConfig(f"role: expected one of {', '.join(ROLE_CONFIGS)}, got {role!r}")
    return config_type


def resolve_file(path: Path, role: str, environment: Mapping[str, str]) -> Resolved[NodeConfig]:
    """What a node of that role, by default the file's own, would run with. Raises BadConfig."""
    stated = parse_config_file(path).get(ROLE_KEY)
    if not role and not stated:
        raise BadConfig(f"config file {path}: say whose it is: {ROLE_KEY}: decode in the file, or --role decode")
    role = role or str(stated)
    return load_merged(config_type_of(role), path, {}, environment, role=role)


def resolve_arguments(
    role: str, config_file: Path | None, arguments: Sequence[str], environment: Mapping[str, str]
) -> Resolved[NodeConfig]:
    """What `pdmesh ROLE --config FILE ARGUMENTS` would run with. Raises BadConfig; an option that the
    role does not have ends as on its own command line.
    """
    config_type = config_type_of(role)
    parsed = _parse_options(role, config_type, arguments)
    return load_merged(config_type, config_file or parsed.config_file, parsed.flags, environment, role=role)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParsedOptions:
    config_file: Path | None
    flags: Mapping[str, FlagValue]


def _parse_options(role: str, config_type: type[NodeConfig], arguments: Sequence[str]) -> _ParsedOptions:
    """Reads options as the command of the role does."""
    parsed: list[_ParsedOptions] = []

    def command(config_file: Path | None, **flags: FlagValue) -> None:
        parsed.append(_ParsedOptions(config_file=config_file, flags=flags))

    parameters = [CONFIG_FILE_PARAMETER, *config_parameters(config_type, panel_of=lambda _: None)]
    take_parameters(command, parameters)
    parser = typer.Typer(add_completion=False)
    parser.command(add_help_option=False)(command)
    typer.main.get_command(parser).main([*arguments], prog_name=f"pdmesh {role}", standalone_mode=False)
    return parsed[0]


def effective_values(resolved: Resolved[NodeConfig]) -> str:
    """A YAML document of all values, which is a configuration file again; each with its origin as a comment."""
    config = resolved.config
    values = dict(config)
    lines = []
    for name, field in type(config).model_fields.items():
        origin = resolved.origins.get(name, DEFAULT_ORIGIN)
        value = values[name]
        if name not in resolved.origins and value != field.default:
            lines.append((f"# {name}:", "drawn at start"))
            continue
        if isinstance(value, SecretStr):
            value = HIDDEN
        elif has_own_syntax(field) and isinstance(value, int):
            value = format_size(value) if _reads_back(value) else value
        lines.append((f"{name}: {_yaml_scalar(value)}", origin))
    width = min(_MAX_ALIGNED, max(len(text) for text, _ in lines))
    document = [f"{ROLE_KEY}: {config.role_name}", *(f"{text:<{width}}  # {origin}" for text, origin in lines)]
    return "\n".join(document) + "\n"


def _reads_back(num_bytes: int) -> bool:
    """Whether the short form, which is rounded, stands for exactly these bytes."""
    try:
        return parse_size(format_size(num_bytes)) == num_bytes
    except ValueError:
        return False


def _yaml_scalar(value: object) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


class _FileSchema(GenerateJsonSchema):
    """The schema of what a file may hold: sizes with a unit as well as numbers."""

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        inner = super().function_before_schema(schema)
        if inner.get("type") != "integer":
            return inner
        return {"anyOf": [inner, {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTkmgt][Ii]?)?[Bb]?\s*$"}]}


def file_schema(role: str) -> dict[str, object]:
    """JSON Schema of the configuration files of a role. Raises BadConfig."""
    config_type = config_type_of(role)
    schema = config_type.model_json_schema(schema_generator=_FileSchema)
    properties = schema["properties"]
    for name, aliases in FIELD_ALIASES.items():
        properties.update({alias: properties[name] for alias in aliases if name in properties})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": f"Configuration of a {role}",
        "properties": {ROLE_KEY: {"const": role}, **properties},
    }


def check_files(files: _FileArgument, role: _Role = "") -> None:
    """Check configuration files as the nodes would, with the environment; every fault is named.

    Files of prefill and decode nodes are also checked against one another.
    """
    faults = []
    configs: dict[Path, NodeConfig] = {}
    for path in files:
        try:
            configs[path] = resolve_file(path, role, os.environ).config
        except BadConfig as error:
            faults.append(error.message if str(path) in error.message else f"{path}: {error.message}")
        else:
            typer.echo(f"{path}: good for a {configs[path].role_name} node")
    faults += disagreements(configs)
    if faults:
        raise BadConfig("; ".join(faults))


def disagreements(configs: Mapping[Path, NodeConfig]) -> list[str]:
    """Why nodes with these configurations could not exchange cache; one entry for each value and each further file."""
    faults = []
    linked = [(path, dict(config)) for path, config in configs.items() if config.role_name in ("prefill", "decode")]
    for name in _MUST_AGREE:
        for path, values in linked[1:]:
            first_path, first = linked[0]
            if values[name] != first[name]:
                faults.append(
                    f"{name}: {first_path} has {first[name]!r}, {path} has {values[name]!r}: their caches do not fit"
                )
    return faults


def show_values(
    context: typer.Context,
    role: _Role = "",
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="<file>", help=f"A {FILE_FORMATS} file.")
    ] = None,
) -> None:
    """Show what a node would run with, and where each value comes from. Takes the options of the role as well.

    The output is a configuration file. Secrets are not shown.
    """
    if not role and config_file is not None:
        role = str(parse_config_file(config_file).get(ROLE_KEY) or "")
    typer.echo(effective_values(resolve_arguments(role, config_file, context.args, os.environ)), nl=False)


def print_schema(role: _Role = "") -> None:
    """Print the JSON Schema of a role's configuration files, for editors and other tools."""
    typer.echo(json.dumps(file_schema(role), indent=2))


def _reporting(work: Callable[Parameters, None]) -> Callable[Parameters, None]:
    @functools.wraps(work)
    def command(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        with reported_failures():
            work(*args, **kwargs)

    return command


config_app = typer.Typer(
    help="Check and show configurations without starting a node.", no_args_is_help=True, add_completion=False
)
config_app.command("check")(_reporting(check_files))
config_app.command("show", context_settings=_TAKES_ROLE_OPTIONS)(_reporting(show_values))
config_app.command("schema")(_reporting(print_schema))
