"""The reader takes nothing on trust and says which key is wrong."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runtime.text.errors import TokenizerError
from model_runtime.text.gguf_metadata import read_gguf_metadata

GgufValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
WriteGguf = Callable[[Mapping[str, GgufValue]], Path]

_VALUES: dict[str, GgufValue] = {
    "general.name": "tiny",
    "count": 7,
    "flag": True,
    "words": ["a", "", "ünïcode"],
    "kinds": [1, 2, 3],
    "scores": [0.5, -1.0],
}


def test_every_kind_of_value_is_read_back(write_gguf: WriteGguf) -> None:
    metadata = read_gguf_metadata(write_gguf(_VALUES))
    assert metadata.string("general.name") == "tiny"
    assert metadata.find_integer("count") == 7
    assert metadata.find_bool("flag") is True
    assert metadata.strings("words") == ("a", "", "ünïcode")
    assert metadata.integers("kinds") == (1, 2, 3)
    assert metadata.floats("scores") == (0.5, -1.0)
    assert metadata.find_string("absent") is None


def test_a_value_of_another_type_is_refused_by_the_name_of_its_key(write_gguf: WriteGguf) -> None:
    metadata = read_gguf_metadata(write_gguf(_VALUES))
    with pytest.raises(TokenizerError, match=r'"count" must be a string, is int'):
        metadata.string("count")
    with pytest.raises(TokenizerError, match=r'"flag" must be an integer, is bool'):
        metadata.find_integer("flag")
    with pytest.raises(TokenizerError, match=r'"count" must be a bool'):
        metadata.find_bool("count")
    with pytest.raises(TokenizerError, match=r'"words" must be an array of integers'):
        metadata.integers("words")
    with pytest.raises(TokenizerError, match=r'"kinds" must be an array of strings'):
        metadata.strings("kinds")
    with pytest.raises(TokenizerError, match=r'"words" must be an array of floats'):
        metadata.floats("words")
    with pytest.raises(TokenizerError, match=r'"count" must be an array'):
        metadata.strings("count")


def test_a_missing_key_is_named(write_gguf: WriteGguf) -> None:
    metadata = read_gguf_metadata(write_gguf(_VALUES))
    with pytest.raises(TokenizerError, match=r'"absent" is missing'):
        metadata.strings("absent")
    with pytest.raises(TokenizerError, match=r'"absent" is missing'):
        metadata.string("absent")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(40))
    with pytest.raises(TokenizerError, match="not a GGUF file"):
        read_gguf_metadata(path)
    path.write_bytes(b"GG")
    with pytest.raises(TokenizerError, match="2 bytes are too few"):
        read_gguf_metadata(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0))
    with pytest.raises(TokenizerError, match="GGUF version 1"):
        read_gguf_metadata(path)


def test_a_file_cut_anywhere_is_refused(write_gguf: WriteGguf) -> None:
    path = write_gguf(_VALUES)
    content = path.read_bytes()
    for num_bytes in range(len(content)):
        path.write_bytes(content[:num_bytes])
        with pytest.raises(TokenizerError):
            read_gguf_metadata(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (struct.pack("<IQ", 8, 2**62), r'"key" claims a string of \d+ bytes, 0 are left'),
        (struct.pack("<IIQ", 9, 8, 2**60), r'"key" claims \d+ strings, 0 bytes are left'),
        (struct.pack("<IIQ", 9, 10, 2**61), r'"key" claims \d+ bytes, 0 are left'),
        (struct.pack("<I", 99), r'"key" has the unknown value type 99'),
        (struct.pack("<IIQ", 9, 9, 1), r'"key" has the unknown value type 9'),
        (struct.pack("<IQ", 8, 1) + b"\xff", r'"key" is not UTF-8'),
    ],
)
def test_a_length_or_type_that_cannot_be_is_refused_by_key(tmp_path: Path, value: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 3) + b"key" + value)
    with pytest.raises(TokenizerError, match=message):
        read_gguf_metadata(path)


def test_a_key_that_appears_twice_is_refused(tmp_path: Path) -> None:
    pair = struct.pack("<Q", 3) + b"key" + struct.pack("<II", 4, 1)
    path = tmp_path / "model.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + pair + pair)
    with pytest.raises(TokenizerError, match='"key" appears twice'):
        read_gguf_metadata(path)


def test_reading_metadata_needs_neither_torch_nor_numpy() -> None:
    script = "import sys, model_runtime.text.gguf_metadata; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@given(noise=st.binary(max_size=200), num_pairs=st.integers(min_value=1, max_value=2**64 - 1))
def test_arbitrary_bytes_never_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, num_pairs: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, num_pairs) + noise)
    try:
        read_gguf_metadata(path)
    except TokenizerError as error:
        assert "noise.gguf" in str(error)  # noqa: PT017 - success is legal as well
