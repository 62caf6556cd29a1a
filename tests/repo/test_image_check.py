"""What `make check` does with the Containerfile, by programs that only write down what they are asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_TAKEN = ("bash", "cat", "dirname", "grep", "id", "mkdir", "mktemp", "rm", "sed", "sort", "tail", "timeout", "tr")
# A command fails where FAILS has its words, and says why in two lines.
_PROGRAM = r"""#!/usr/bin/env bash
words="${0##*/} $*"
echo "$words" >>calls
while read -r failing; do
  if [ -z "$failing" ] || [[ $words != *"$failing"* ]]; then continue; fi
  printf 'first this\nno %s today\n' "$failing" >&2
  exit 3
done <<<"$FAILS"
if [[ $words == podman*Size* ]]; then echo 123456789; fi
if [[ $words == python*version_info* ]]; then echo "bookworm 3 11"; fi
if [[ $words == apt-get*indextargets* ]]; then
  printf 'deb http://mirror/debian %s main\n' bookworm bookworm-updates trixie
fi
if [[ $words == mmdebstrap* ]]; then cat "${@: -1}" >mirrors; fi
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """A folder with what is needed of the project, and the programs that a machine has."""

    folder: Path

    def check(self, *, fails: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess[str]:
        own = {"PATH": str(self.folder / "bin"), "FAILS": "\n".join(fails)}
        kept = {name: value for name, value in os.environ.items() if name in ("HOME", "TMPDIR")}
        return subprocess.run(
            [self.folder / "tools" / "check_image.sh"],
            cwd=self.folder,
            env=kept | own | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self, word: str) -> list[str]:
        return [line for line in (self.folder / "calls").read_text(encoding="utf-8").splitlines() if word in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """It has podman and mmdebstrap, and runs containers as it is."""
    for name in ("check_image.sh", "image_base.sh"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        shutil.copy(_ROOT / "tools" / name, tmp_path / "tools" / name)
    shutil.copy(_ROOT / "Containerfile", tmp_path)
    (tmp_path / "bin").mkdir()
    for name in _TAKEN:
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "bin" / name).symlink_to(found)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for program in ("bin/podman", "bin/runc", "bin/mmdebstrap", "bin/apt-get", ".venv/bin/python"):
        (tmp_path / program).write_text(_PROGRAM, encoding="utf-8")
        (tmp_path / program).chmod(0o755)
    return Machine(tmp_path)


_NO_IMAGE = ("image exists",)
_NO_REGISTRY = (*_NO_IMAGE, "podman pull")


def _only_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    return line


def test_an_image_is_built_on_what_the_registry_has_and_run(machine: Machine) -> None:
    line = _only_line(machine.check(fails=_NO_IMAGE))
    assert line.startswith("image: built in ")
    assert "123 MB" in line
    (build,) = machine.calls("--target router")
    assert "--build-arg BASE=docker.io/library/debian:bookworm-slim" in build
    assert "--build-context build=build/image" in build
    assert machine.calls("tests/helm/test_router_container.py")
    assert not machine.calls("mmdebstrap")
    assert machine.calls("podman")[-1].startswith("podman rmi")


def test_without_a_registry_the_base_is_made_of_debian_packages_of_the_mirrors_of_the_machine(machine: Machine) -> None:
    assert "built in" in _only_line(machine.check(fails=_NO_REGISTRY))
    (build,) = machine.calls("--target router")
    assert "--build-arg BASE=localhost/pdmesh-base:bookworm" in build
    assert (machine.folder / "mirrors").read_text(encoding="utf-8").splitlines() == [
        "deb http://mirror/debian bookworm main",
        "deb http://mirror/debian bookworm-updates main",
    ]


def test_a_base_that_was_made_before_is_taken_again(machine: Machine) -> None:
    _only_line(machine.check(fails=("image exists docker.io",)))
    assert not machine.calls("podman pull")
    assert not machine.calls("mmdebstrap")


@pytest.mark.parametrize(
    ("absent", "fails", "reason"),
    [
        ("podman", (), "podman is not installed"),
        ("mmdebstrap", _NO_REGISTRY, "bookworm-slim cannot be pulled, and mmdebstrap, which makes another one, is"),
        (
            None,
            (*_NO_REGISTRY, "mmdebstrap"),
            "cannot be pulled, and mmdebstrap makes no other one: no mmdebstrap today",
        ),
        (None, (*_NO_REGISTRY, "podman import"), "no podman import today"),
        (None, ("podman info",), "podman does not work here: no podman info today"),
        (None, ("pdmesh-check -",), "podman builds nothing here: no pdmesh-check - today"),
    ],
)
def test_where_nothing_can_be_built_it_says_why_and_passes(
    machine: Machine, absent: str | None, fails: tuple[str, ...], reason: str
) -> None:
    if absent is not None:
        (machine.folder / "bin" / absent).unlink()
    line = _only_line(machine.check(fails=fails))
    assert line.startswith("image: NOT BUILT: ")
    assert reason in line


def test_wheels_of_another_release_make_no_image(machine: Machine) -> None:
    python = machine.folder / ".venv" / "bin" / "python"
    python.write_text(_PROGRAM.replace("bookworm 3 11", "trixie 3 13"), encoding="utf-8")
    line = _only_line(machine.check())
    assert line.startswith("image: NOT BUILT: ")
    assert line.endswith("those of this machine are of trixie 3 13")
    assert not machine.calls("podman")


def test_nothing_is_installed_on_a_machine_of_somebody(machine: Machine) -> None:
    (machine.folder / "bin" / "podman").unlink()
    machine.check()
    assert not machine.calls("apt-get")


def test_in_ci_root_installs_what_is_missing(machine: Machine) -> None:
    (machine.folder / "bin" / "podman").unlink()
    own = machine.folder / "bin" / "id"
    own.unlink()
    own.write_text("#!/usr/bin/env bash\necho 0\n", encoding="utf-8")
    own.chmod(0o755)
    machine.check(CI="true")
    assert machine.calls("apt-get install -y -q --no-install-recommends podman")


def test_where_containers_can_be_built_and_not_run_it_says_so(machine: Machine) -> None:
    line = _only_line(machine.check(fails=("podman run",)))
    assert line.startswith("image: NOT RUN, only built in ")
    assert line.endswith("no podman run today")


@pytest.mark.parametrize(
    ("fails", "complaint"),
    [
        ("--target router", "the build failed"),
        ("-m pip wheel", "pip makes no wheels"),
        ("test_router_container.py", "does not run as the chart runs it"),
    ],
)
def test_a_build_that_was_begun_must_end_well(machine: Machine, fails: str, complaint: str) -> None:
    result = machine.check(fails=[fails])
    assert result.returncode == 1
    assert complaint in result.stderr
    assert f"no {fails} today" in result.stderr
    assert not result.stdout


def test_the_table_of_a_run_ends_with_what_could_not_be_checked(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "times").write_text("audit\t3.2\t1.1\n", encoding="utf-8")
    (tmp_path / "build" / "audit.log").write_text("audit: asked\naudit: NOT CHECKED for anything\n", encoding="utf-8")
    (tmp_path / "build" / "check-image.log").write_text("image: NOT BUILT: no podman\n", encoding="utf-8")
    result = subprocess.run(
        [_ROOT / "tools" / "timed.sh", "--table", "4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = result.stdout.strip().splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["part", "audit", "all,"]
    assert lines[3:] == ["", "audit: NOT CHECKED for anything", "image: NOT BUILT: no podman"]
