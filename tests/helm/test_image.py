"""The Containerfile: linted, and in step with what it builds and with the chart that runs it."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib

import yaml
from support.helm_chart import CHART, program_or_skip

_ROOT = CHART.parents[1]
_CONTAINERFILE = _ROOT / "Containerfile"
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _instructions() -> list[tuple[str, str, str]]:
    """(stage, instruction, its text on one line), in order; the stage of what comes before the first one is empty."""
    text = re.sub(r"^#.*\n", "", _CONTAINERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    stage, found = "", []
    for line in text.replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stage = rest.split(" AS ")[1]
        if name:
            found.append((stage, name, re.sub(r"\s+", " ", rest)))
    return found


def _installed_packages(stages: tuple[str, ...]) -> set[str]:
    commands = [text for stage, name, text in _instructions() if name == "RUN" and stage in stages]
    lists = re.findall(r"--no-install-recommends ([^&]*)", " ".join(commands))
    return {package for words in lists for package in words.split()}


def test_the_linter_has_nothing_to_say() -> None:
    command = [program_or_skip("hadolint"), str(_CONTAINERFILE)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_build_gets_everything_that_the_package_is_made_of() -> None:
    copied = {
        source
        for stage, name, text in _instructions()
        if stage == "build" and name == "COPY"
        for source in text.split()[:-1]
    }
    cmake = (_ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    subdirectories = {path.split("/")[0] for path in re.findall(r"^ *add_subdirectory\((.*?)\)", cmake, re.MULTILINE)}
    packages = set(_PROJECT["tool"]["scikit-build"]["wheel"]["packages"])
    assert copied == packages | subdirectories | {"pyproject.toml", "README.md", "CMakeLists.txt"}
    assert all((_ROOT / source).exists() for source in copied)
    ignored = (_ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied


def test_every_stage_that_installs_hears_what_pip_is_to_be_told() -> None:
    """An argument holds in the stage that declares it, not in those that begin with it."""
    for stage in ("build", "router-build", "node-build"):
        names = {text for of, name, text in _instructions() if of == stage and name == "ARG"}
        assert {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT"} <= names


def test_the_extras_that_are_installed_exist() -> None:
    extras = [text.partition("=")[2] for _, name, text in _instructions() if name == "ARG" and "EXTRAS" in text]
    assert extras == ["cpu,compute"]
    assert set(extras[0].split(",")) < set(_PROJECT["project"]["optional-dependencies"])


def test_the_stages_have_the_debian_packages_that_setup_installs() -> None:
    setup = (_ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
    function = setup.split("missing_packages() {")[1].split("\n}")[0]
    needed = set(re.findall(r"\|\| echo (\S+)$", function, re.MULTILINE)) - {"libgtest-dev"}
    assert needed >= {"g++", "cmake", "make", "libxxhash-dev", "libibverbs1", "libnuma1", "libcurl4", "python3.11"}
    libraries = {package for package in needed if package.startswith("lib") and not package.endswith("-dev")}
    assert libraries <= _installed_packages(("base", "node"))
    assert needed - libraries - {"python3.11"} <= _installed_packages(("build",))
    assert "python3.11" in _installed_packages(("base",))
    assert not _installed_packages(("base", "node", "router")) & _installed_packages(("build",)) - {"ca-certificates"}


def test_the_default_image_is_the_one_with_every_role_and_runs_as_the_user_of_the_chart() -> None:
    stages = list(dict.fromkeys(stage for stage, _, _ in _instructions()))
    assert stages[-1] == "node"
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    user = values["podSecurityContext"]["runAsUser"]
    for image in ("router", "node"):
        steps = [(name, text) for stage, name, text in _instructions() if stage == image]
        assert steps[-1] == ("USER", f"{user}:{user}")
    (entry_point,) = [text for _, name, text in _instructions() if name == "ENTRYPOINT"]
    assert json.loads(entry_point) == ["pdmesh"]
    assert "pdmesh" in _PROJECT["project"]["scripts"]
    (exposed,) = [text for _, name, text in _instructions() if name == "EXPOSE"]
    assert sorted(map(int, exposed.split())) == sorted(values["ports"].values())
