"""One request's way from tokens back to text: detokenising and stop strings, without I/O.

Belongs to one request. The tokens of a delta are those whose text has been seen, not those whose text is shown: text
may lag behind while a character or a possible stop string is incomplete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdmesh.v1 import inference_pb2

from model_runtime.text.detokenizer import IncrementalDetokenizer
from model_runtime.text.stop_strings import StopStringMatcher
from model_runtime.text.tokenizer import Tokenizer


class TextStream:
    """Feed it tokens until `matched_stop` is set or the tokens end; then nothing may be pushed any more."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str], stop_token_ids: Iterable[int]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopStringMatcher(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._vocab_size = tokenizer.vocab_size
        self._num_tokens = 0
        self._matched_stop: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far, the one that completed a stop string included."""
        return self._num_tokens

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._matched_stop

    def push(self, tokens: Iterable[inference_pb2.SampledToken]) -> inference_pb2.Delta:
        """What the client may see of these tokens. Those behind a stop string are dropped.

        Raises ValueError for a token outside the vocabulary.
        """
        delta = inference_pb2.Delta()
        shown: list[str] = []
        for token in tokens:
            if token.token_id >= self._vocab_size:
                raise ValueError(f"token {token.token_id} is outside [0, {self._vocab_size})")
            delta.tokens.append(token)
            self._num_tokens += 1
            # A stop token ends the generation and is not part of the text.
            text = "" if token.token_id in self._stop_token_ids else self._detokenizer.push((token.token_id,))
            shown.append(self._match(text))
            if self._matched_stop is not None:
                break
        delta.text = "".join(shown)
        return delta

    def finish(self) -> str:
        """The text still held back, now that no token follows; it may yet complete a stop string."""
        text = self._match(self._detokenizer.finish())
        return text if self._matched_stop is not None else text + self._matcher.finish()

    def _match(self, text: str) -> str:
        scan = self._matcher.push(text)
        self._matched_stop = scan.matched
        return scan.text
