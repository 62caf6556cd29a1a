"""The model as a gateway needs it: what it is, and its tokenizer as an archive of files. Immutable."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

from model_runtime.text.errors import TokenizerError
from model_runtime.text.tokenizer import Tokenizer, load_tokenizer
from model_runtime.text.tokenizer_files import CONFIG_FILE, tokenizer_files
from node_runtime.errors import BadConfig

_CHUNK_BYTES: Final = 64 * 1024
# The same archive wherever and whenever it is made.
_NO_DATE: Final = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """`archive` is a zip of the tokenizer's files, with `archive_sha256` in hexadecimal digits."""

    tokenizer: Tokenizer
    model_type: str
    architectures: tuple[str, ...]
    archive: bytes
    archive_sha256: str

    @classmethod
    def load(cls, path: str) -> Self:
        """Of the model at `path`; blocking. Raises BadConfig naming the file at fault."""
        try:
            files = tokenizer_files(path)
            tokenizer = load_tokenizer(path)
            config: object = json.loads(files[CONFIG_FILE])
        except (TokenizerError, ValueError) as error:
            raise BadConfig(f"engine_protocol: smg needs the tokenizer of the model: {error}") from error
        archive = _archive(files)
        return cls(
            tokenizer=tokenizer,
            model_type=_text(config, "model_type"),
            architectures=_texts(config, "architectures"),
            archive=archive,
            archive_sha256=hashlib.sha256(archive).hexdigest(),
        )

    def archive_parts(self) -> Iterator[tuple[bytes, bool]]:
        """The archive in pieces that fit a message; True with the last one."""
        for begin in range(0, len(self.archive), _CHUNK_BYTES):
            end = begin + _CHUNK_BYTES
            yield self.archive[begin:end], end >= len(self.archive)


def _archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, _NO_DATE), files[name], zipfile.ZIP_DEFLATED, 1)
    return buffer.getvalue()


def _text(config: object, name: str) -> str:
    """Empty where the file does not say."""
    value = config.get(name) if isinstance(config, dict) else None
    return value if isinstance(value, str) else ""


def _texts(config: object, name: str) -> tuple[str, ...]:
    value = config.get(name) if isinstance(config, dict) else None
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()
