"""The tokenizer of a model as the files that other programs load it from: tokenizer.json and the JSON beside it.

Those of a checkpoint directory are handed on as they are. A GGUF file has none, so they are made of its metadata, with
the same tokens, special tokens and chat template. Knows nothing of who reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, processors

from model_runtime.text.errors import TokenizerError
from model_runtime.text.gguf_metadata import read_gguf_metadata
from model_runtime.text.gguf_tokenizer import load_gguf_tokenizer
from model_runtime.text.tokenizer_model import TokenizerModel
from model_runtime.text.vocabulary import WORD_START, Spelling

CONFIG_FILE: Final = "config.json"
_TOKENIZER_FILE: Final = "tokenizer.json"
_TEXTS_FILE: Final = "tokenizer_config.json"
_NAMES: Final = (
    _TOKENIZER_FILE,
    _TEXTS_FILE,
    CONFIG_FILE,
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    "chat_template.jinja",
)


def tokenizer_files(path: str | Path) -> dict[str, bytes]:
    """Contents by name, of a GGUF file or a checkpoint directory. Raises TokenizerError naming the file at fault."""
    location = Path(path)
    if location.is_dir():
        return _read_files(location)
    if not location.is_file():
        raise TokenizerError(f"{location}: no such file or directory")
    return _made_files(location)


def _read_files(directory: Path) -> dict[str, bytes]:
    try:
        files = {name: (directory / name).read_bytes() for name in _NAMES if (directory / name).is_file()}
    except OSError as error:
        raise TokenizerError(f"{directory}: {error}") from error
    for name in (_TOKENIZER_FILE, CONFIG_FILE):
        if name not in files:
            raise TokenizerError(f"{directory / name}: no such file; a checkpoint directory needs its {name}")
    return files


def _made_files(path: Path) -> dict[str, bytes]:
    model = load_gguf_tokenizer(path)
    architecture = read_gguf_metadata(path, with_arrays=False).string("general.architecture")
    ends = list(model.eos_token_ids)
    config = {
        "model_type": architecture,
        "vocab_size": len(model.vocabulary.tokens),
        "max_position_embeddings": model.max_context_tokens,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
    }
    return {
        _TOKENIZER_FILE: _completed(model).to_str().encode(),
        _TEXTS_FILE: json.dumps(_texts(model)).encode(),
        CONFIG_FILE: json.dumps(config).encode(),
    }


def _completed(model: TokenizerModel) -> Tokenizer:
    """The backend with the steps that ours does without: spelling text from tokens, and the tokens around a text."""
    backend = model.backend
    backend.decoder = _decoder(model.vocabulary.spelling)
    around = {model.vocabulary.tokens[token_id]: token_id for token_id in model.prefix_token_ids}
    around |= {model.vocabulary.tokens[token_id]: token_id for token_id in model.suffix_token_ids}
    if around:
        begin = [str(model.vocabulary.tokens[token_id]) for token_id in model.prefix_token_ids]
        end = [str(model.vocabulary.tokens[token_id]) for token_id in model.suffix_token_ids]
        backend.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end], special_tokens=[(str(token), token_id) for token, token_id in around.items()]
        )
    return backend


def _decoder(spelling: Spelling) -> decoders.Decoder:
    if spelling is Spelling.BYTE_LEVEL:
        return decoders.ByteLevel()
    steps = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps)


def _texts(model: TokenizerModel) -> dict[str, object]:
    tokens = model.vocabulary.tokens
    texts: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_context_tokens,
        "add_bos_token": bool(model.prefix_token_ids),
        "clean_up_tokenization_spaces": False,
    }
    if model.eos_token_ids:
        texts["eos_token"] = tokens[model.eos_token_ids[0]]
    if model.prefix_token_ids:
        texts["bos_token"] = tokens[model.prefix_token_ids[0]]
    template = model.chat_template
    if template is not None:
        # What it calls by these names, which need not be what goes around a text.
        named = {"bos_token": template.bos_token, "eos_token": template.eos_token}
        texts |= {"chat_template": template.source} | {name: token for name, token in named.items() if token}
    return texts
