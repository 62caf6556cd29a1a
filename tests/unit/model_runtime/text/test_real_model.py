"""SmolLM2's own file: the ids of the reference implementation, fast, and without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gguf_reading import read_once
from transformers import AutoTokenizer

from model_runtime.text.chat_template import ChatMessage
from model_runtime.text.detokenizer import IncrementalDetokenizer
from model_runtime.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.real_model

_TEXTS = (
    "The capital of France is",
    "a",
    " leading and trailing ",
    "two  spaces   three    four",
    "3.14159 and 1,000,000 in 2024",
    "x=1;y=22;z=333",
    "don't we'll I'M they'RE",
    "tabs\tand\t\ttabs",
    "lines\n\nmore\r\nlines\n",
    "   \n  \n",
    "日本語のテキスト、中文，한국어",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "Ünïcödé naïve é e\u0301",
    "العربية עברית हिन्दी",
    "def f(x):\n    return x ** 2  # square\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_start|> <|im_end|>",
    "\x00\x01\x7f\ufffd\u200b\u00a0",
    "https://example.org/a?b=c&d=%20#e",
    "A" * 300,
)


# The vocabulary lacks some control bytes and the lead bytes of planes without characters; text made of them is lost.
_ASSIGNED = st.characters(exclude_categories=("Cc", "Cn", "Co", "Cs"))


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.mark.timeout(120)
def test_ids_text_and_chat_equal_those_of_transformers(tokenizer: Tokenizer, smollm2_path: Path) -> None:
    with read_once():
        reference = AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    for text in _TEXTS:
        token_ids = tokenizer.encode(text, add_special=True)
        assert token_ids == reference.encode(text), text
        assert tokenizer.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True), text
    chat = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    messages = [ChatMessage(role=message["role"], content=message["content"]) for message in chat]
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert tokenizer.render_chat(messages) == expected
    assert tokenizer.encode_chat(messages) == reference.encode(expected)


def test_spaces_before_a_digit_split_as_in_the_published_tokenizer(tokenizer: Tokenizer) -> None:
    """The reference's GGUF conversion drops the digit split and glues one of the spaces to the digit's word."""
    assert [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode("x  12")] == [b"x", b"  ", b"1", b"2"]


def test_the_file_says_when_to_stop_and_how_long_a_context_may_be(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.max_context_tokens == 8192
    assert tokenizer.eos_token_ids == (2,)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(text=st.text(_ASSIGNED, max_size=60))
def test_any_text_round_trips_in_one_piece_and_in_many(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    streamed = "".join(detokenizer.push([token_id]) for token_id in token_ids) + detokenizer.finish()
    assert streamed == tokenizer.decode(token_ids)
    if "<" not in text:
        assert streamed == text


def test_loading_needs_neither_torch_nor_transformers(smollm2_path: Path) -> None:
    program = (
        "import sys; from model_runtime.text.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(smollm2_path)!r});"
        "print([name for name in ('torch', 'transformers', 'gguf', 'grpc') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
