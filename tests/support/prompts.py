"""Prompts that differ in what they exercise, not only in what they say."""

from __future__ import annotations

PREFIX_GRANULARITY = 64
TOKEN_BUDGET = 512

STORY = (
    "The lighthouse keeper wrote in the same book every evening: the wind, the ships, the colour of the water. "
    "In forty years he had filled thirty volumes, and no one but the gulls had ever seen him turn a page. "
)

TEXTS = {
    "short": "The capital of France is",
    "one word": "Hello",
    "story opening": "Once upon a time",
    "code": "def fibonacci(n):\n    ",
    "list": "The three primary colours are:\n1.",
    "numbers": "2, 4, 6, 8, 10, 12,",
    "unicode": "Voilà — naïve café, 你好, 🙂 means",
    "whitespace": "\n\n\tIndented\n\n\tagain\n",
    "question": "Q: What is the boiling point of water at sea level?\nA:",
    "dialogue": '"Where are you going?" she asked.\n"',
    "several blocks": STORY,
    "several chunks": STORY * 16,
}

CHATS = {
    "chat": [("user", "What is gravity? Answer in one sentence.")],
    "chat with system": [("system", "You are terse."), ("user", "Name two planets.")],
    "chat of several turns": [("user", "Hi!"), ("assistant", "Hello! How can I help?"), ("user", "Tell me a joke.")],
}

# By length in tokens: one token; one below, exactly and one above a block; exactly one chunk.
TOKEN_LENGTHS = (1, PREFIX_GRANULARITY - 1, PREFIX_GRANULARITY, PREFIX_GRANULARITY + 1, TOKEN_BUDGET)


def token_prompt(length: int) -> list[int]:
    """Ordinary tokens of the vocabulary, fixed for a length."""
    return [100 + (7919 * (position + 1) + 31 * length) % 20_000 for position in range(length)]
