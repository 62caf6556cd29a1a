"""How fast a node computes, measured from its own forward passes.

Knows no clock: durations come in. Old passes fade, so that the numbers follow the load and survive an idle hour.
"""

from __future__ import annotations

from typing import Final

# What a pass weighs when the next one is counted: about the last fifty matter.
_FADING: Final = 0.98


class StepRates:
    """Of the passes of one engine. Owned by its thread."""

    def __init__(self) -> None:
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._decode_steps = 0.0
        self._decode_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of passes with prompts in them, their completion rows included; 0 before there was one."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s > 0 else 0.0

    @property
    def decode_step_s(self) -> float:
        """Mean duration of passes in which only completions grew; 0 before there was one."""
        return self._decode_s / self._decode_steps if self._decode_steps > 0 else 0.0

    def note_pass(self, *, num_prefill_rows: int, num_tokens: int, duration_s: float) -> None:
        """One pass over `num_tokens` input tokens, those of `num_prefill_rows` rows of prompts among them."""
        if num_prefill_rows:
            self._prefill_tokens = self._prefill_tokens * _FADING + num_tokens
            self._prefill_s = self._prefill_s * _FADING + duration_s
        else:
            self._decode_steps = self._decode_steps * _FADING + 1
            self._decode_s = self._decode_s * _FADING + duration_s
