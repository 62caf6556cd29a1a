"""ForwardBatch: what a model needs to know of one forward, besides the cache.

Made from a scheduler plan and the metadata checked against the cache contract. Knows no block, page or request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cache_runtime.device import CpuDevice, Device
from cache_runtime.mapping.batch_metadata import CacheBatchMetadata
from cache_runtime.mapping.write_locations import span_tokens

NO_TOKENS: Final = np.empty(0, dtype=np.int64)


class TokenPlan(Protocol):
    """The part of a scheduler plan that a forward reads; `scheduler_core.Plan` is one."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def logits_wanted(self) -> npt.NDArray[np.bool_] | npt.NDArray[np.uint8]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """Rows of consecutive tokens, concatenated. Tensors are on the device of the forward.

    `token_ids`, `positions`: int64[num_tokens]. `begins`, `lengths`: int32[num_rows], position of a row's first token
    and number of its tokens. `logit_rows`: int64[num_logits], the rows whose last token's logits are wanted, ascending;
    `logit_tokens`: int64[num_logits + num_scored], those tokens among all tokens, and behind them others whose logits
    are wanted because they say how likely the prompt was.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    begins: torch.Tensor
    lengths: torch.Tensor
    logit_rows: npt.NDArray[np.int64]
    logit_tokens: torch.Tensor

    @classmethod
    def from_plan(
        cls,
        plan: TokenPlan,
        metadata: CacheBatchMetadata,
        device: Device | None = None,
        *,
        scored_tokens: npt.NDArray[np.int64] = NO_TOKENS,
    ) -> ForwardBatch:
        """On the CPU where no device is given. Raises ValueError when the plan's tokens do not match its rows.

        `scored_tokens`: int64[num_scored], among all tokens.
        """
        if plan.token_ids.shape != (metadata.num_tokens,):
            raise ValueError(
                f"token_ids has shape {plan.token_ids.shape}, the rows' input_lengths sum to {metadata.num_tokens}"
            )
        _, positions = span_tokens(metadata.begins, metadata.input_lengths)
        logit_rows = np.flatnonzero(plan.logits_wanted).astype(np.int64)
        last_tokens = np.cumsum(metadata.input_lengths, dtype=np.int64) - 1
        upload = (CpuDevice() if device is None else device).upload
        return cls(
            token_ids=upload(plan.token_ids.astype(np.int64)),
            positions=upload(positions),
            begins=upload(metadata.begins.copy()),
            lengths=upload(metadata.input_lengths.copy()),
            logit_rows=logit_rows,
            logit_tokens=upload(np.concatenate((last_tokens[logit_rows], scored_tokens))),
        )

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]
