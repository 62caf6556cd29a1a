"""Puts a model file where a node will look for it: from a URL, checked against the hash that the caller names.

Knows nothing about what is in the file. What is there already and has that hash is kept, so that a restarted container
downloads nothing.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from node_runtime.config import format_size, without_credentials
from pdmesh_cli.model_fetch import ModelFetchError

_CHUNK_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Of silence, not of the whole download.
_TIMEOUT_S = 60.0
_BYTES_PER_LINE = 1 << 30


def fetch_to_file(url: str, *, sha256: str, target: Path) -> None:
    """`download_model` that says on standard output what it does. Raises ModelFetchError."""
    num_said = 0

    def show(num_bytes: int) -> None:
        nonlocal num_said
        if num_bytes >= (num_said + 1) * _BYTES_PER_LINE:
            num_said = num_bytes // _BYTES_PER_LINE
            print(f"{format_size(num_bytes)} received", flush=True)

    is_new = download_model(url, sha256=sha256, target=target, progress=show)
    size = format_size(target.stat().st_size)
    print(f"{target}: {size}, {'downloaded' if is_new else 'was there already'}")


def download_model(url: str, *, sha256: str, target: Path, progress: Callable[[int], None]) -> bool:
    """Makes `target` the file at `url`; False when it was there already. `progress` is told the bytes received so far.

    `sha256` is that of the whole file, hexadecimal. Raises ModelFetchError, with `target` as it was, when the file
    cannot be had or has another hash.
    """
    wanted = sha256.lower()
    if not _SHA256.fullmatch(wanted):
        raise ModelFetchError(f"sha256: expected 64 hexadecimal digits, got {sha256!r}")
    if urlsplit(url).scheme not in ("http", "https"):
        raise ModelFetchError(f"url: expected http:// or https://, got {without_credentials(url)!r}")
    if target.is_file() and _sha256_of(target) == wanted:
        return False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target: a file is moved within one volume only.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as directory:
            partial = Path(directory) / target.name
            with partial.open("wb") as sink:
                found = _download(url, sink, progress)
            if found != wanted:
                raise ModelFetchError(
                    f"{without_credentials(url)} has sha256 {found}, expected {wanted}; nothing was kept"
                )
            partial.replace(target)
    except (OSError, ValueError) as error:
        raise ModelFetchError(f"{without_credentials(url)}: {without_credentials(_reason(error))}") from error
    return True


def _reason(error: OSError | ValueError) -> str:
    """What went wrong, without the names of classes and numbers that Python puts around it."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        return _reason(error.reason)
    if isinstance(error, OSError) and error.strerror and not isinstance(error, urllib.error.HTTPError):
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


def _download(url: str, sink: BinaryIO, progress: Callable[[int], None]) -> str:
    """Writes the body to `sink`; returns its SHA-256."""
    digest = hashlib.sha256()
    num_bytes = 0
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        while chunk := response.read(_CHUNK_BYTES):
            sink.write(chunk)
            digest.update(chunk)
            num_bytes += len(chunk)
            progress(num_bytes)
        expected = response.headers.get("Content-Length")
    if expected is not None and num_bytes != int(expected):
        raise OSError(f"the connection ended after {num_bytes} of {expected} bytes")
    return digest.hexdigest()


def _sha256_of(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
