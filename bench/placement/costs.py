"""How long things take on the simulated machines: a roofline of an accelerator and a link.

The defaults are an 8-billion-parameter model with grouped queries in bfloat16 (32 layers of width 4096, 8 key and value
heads of 128) on one accelerator of 990 TFLOP/s and 3.35 TB/s, of which 40 % and 80 % are reached, with a 100 Gbit/s
link of which 80 % are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_core import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates and sizes in base units."""

    flops: float = 990e12 * 0.4
    memory_bytes_per_s: float = 3.35e12 * 0.8
    link_bytes_per_s: float = 12.5e9 * 0.8
    weight_bytes: float = 16e9
    num_parameters: float = 8e9
    attention_width: int = 32 * 4096
    cache_bytes_per_token: int = 2 * 32 * 8 * 128 * 2
    # Of every forward pass, and of every message between nodes.
    step_s: float = 0.002
    message_s: float = 0.0005

    def pass_s(self, plan: Plan) -> float:
        """One forward pass: weights are read once or computed with, and each row attends to what is before it."""
        lengths, begins = plan.input_lengths.astype(np.float64), plan.begins.astype(np.float64)
        num_prefill = plan.num_prefill_rows
        linear_s = max(
            self.weight_bytes / self.memory_bytes_per_s,
            2 * self.num_parameters * float(lengths.sum()) / self.flops,
        )
        # Scores and sums of values: two products, each of two operations per element.
        attended = float((lengths[:num_prefill] * (begins[:num_prefill] + lengths[:num_prefill] / 2)).sum())
        read_tokens = float(begins[num_prefill:].sum())
        attention_s = (
            4 * self.attention_width * attended / self.flops
            + read_tokens * self.cache_bytes_per_token / self.memory_bytes_per_s
        )
        return self.step_s + linear_s + attention_s

    def prefill_s(self, prompt_tokens: int) -> float:
        """A prompt alone, nothing of it cached."""
        linear = 2 * self.num_parameters * prompt_tokens
        return self.step_s + (linear + 4 * self.attention_width * prompt_tokens**2 / 2) / self.flops

    def transfer_s(self, num_tokens: int) -> float:
        """The cache of that many tokens over the link."""
        return num_tokens * self.cache_bytes_per_token / self.link_bytes_per_s


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(np.asarray(values), percent))
