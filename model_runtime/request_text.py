"""The tokens of one request, for sampling that depends on them: the prompt, and what was generated behind it.

Belongs to whoever runs the request and to one thread. Knows no logits: `sampler` reads it and leaves scores in it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from model_runtime.sampler import SampledToken

TokenIds = npt.NDArray[np.int64]


class RequestText:
    """Grows by `append`; the last `num_output_tokens` of the tokens it begins with were generated earlier."""

    def __init__(self, token_ids: npt.NDArray[np.int32], *, num_output_tokens: int = 0) -> None:
        """`token_ids`: int32[num_tokens], at least one more than `num_output_tokens`."""
        num_prompt_tokens = token_ids.size - num_output_tokens
        if not 0 < num_prompt_tokens <= token_ids.size:
            raise ValueError(f"num_output_tokens: {num_output_tokens} given, of {token_ids.size} tokens")
        self._prompt: tuple[int, ...] = tuple(token_ids[:num_prompt_tokens].tolist())
        self._seen = set(self._prompt)
        self._output_counts: Counter[int] = Counter()
        self._scores: dict[int, SampledToken] = {}
        for token_id in token_ids[num_prompt_tokens:].tolist():
            self.append(token_id)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self._prompt

    def append(self, token_id: int) -> None:
        """One more token was generated."""
        self._seen.add(token_id)
        self._output_counts[token_id] += 1

    def seen_ids(self) -> TokenIds:
        """int64[n]: each token of prompt and output once, in no particular order."""
        return np.fromiter(self._seen, dtype=np.int64, count=len(self._seen))

    def output_counts(self) -> tuple[TokenIds, TokenIds]:
        """int64[n], int64[n]: each generated token, and how often it was."""
        counts = self._output_counts
        ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
        return ids, np.fromiter(counts.values(), dtype=np.int64, count=len(counts))

    # Log-probabilities of the prompt.

    def keep_score(self, position: int, score: SampledToken) -> None:
        """The log-probability of the prompt's token at `position`, given those before it."""
        self._scores[position] = score

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of the whole prompt are known."""
        return len(self._scores) == len(self._prompt) - 1

    def scores(self) -> tuple[SampledToken, ...]:
        """Those of all positions but the first, which has none. Raises ValueError while one is missing."""
        positions = range(1, len(self._prompt))
        missing = next((position for position in positions if position not in self._scores), None)
        if missing is not None:
            raise ValueError(f"position {missing} of a prompt of {len(self._prompt)} tokens has not been scored")
        return tuple(self._scores[position] for position in positions)
