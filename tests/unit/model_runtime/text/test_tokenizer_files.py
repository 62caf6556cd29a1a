"""The files that other programs load a tokenizer from: those of a directory, and those made of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import tokenizers
from support.tiny_checkpoint import write_tiny_checkpoint

from model_runtime.text.errors import TokenizerError
from model_runtime.text.tokenizer import load_tokenizer
from model_runtime.text.tokenizer_files import tokenizer_files

GgufValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
WriteGguf = Callable[[Mapping[str, GgufValue]], Path]


@pytest.mark.parametrize("spelling", ["byte_level_values", "sentencepiece_values"])
def test_what_is_made_of_a_gguf_file_encodes_and_decodes_as_ours(
    request: pytest.FixtureRequest, write_gguf: WriteGguf, spelling: str
) -> None:
    values: dict[str, GgufValue] = request.getfixturevalue(spelling)
    path = write_gguf({**values, "tokenizer.ggml.add_bos_token": True})
    own = load_tokenizer(path)
    other = tokenizers.Tokenizer.from_str(tokenizer_files(path)["tokenizer.json"].decode())
    for text in ("hello a", "abc", "a  12 b", "é 🙂"):
        assert other.encode(text, add_special_tokens=True).ids == own.encode(text, add_special=True)
        assert other.encode(text, add_special_tokens=False).ids == own.encode(text)
        assert other.decode(own.encode(text)) == own.decode(own.encode(text))


def test_its_other_files_say_what_the_metadata_say(
    write_gguf: WriteGguf, byte_level_values: dict[str, GgufValue]
) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    files = tokenizer_files(write_gguf({**byte_level_values, "tokenizer.chat_template": template}))
    texts, config = json.loads(files["tokenizer_config.json"]), json.loads(files["config.json"])
    assert (texts["chat_template"], texts["bos_token"], texts["eos_token"]) == (template, "<|begin|>", "<|end|>")
    assert (config["model_type"], config["eos_token_id"], config["max_position_embeddings"]) == ("llama", 1, 128)


def test_the_files_of_a_directory_are_handed_on_as_they_are(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    files = tokenizer_files(folder)
    assert set(files) == {"tokenizer.json", "config.json", "chat_template.jinja"}
    assert all(content == (folder / name).read_bytes() for name, content in files.items())
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        tokenizer_files(folder)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="nowhere: no such file"):
        tokenizer_files(tmp_path / "nowhere")
