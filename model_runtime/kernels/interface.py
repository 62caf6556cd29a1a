"""What the kernels of a device do, whatever it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class PackedWeight(Protocol):
    """A weight [num_columns, depth] in whatever layout some kernels read best; only they understand it."""

    @property
    def num_columns(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""


class Kernels(Protocol):
    """The operations a model leaves to its device. Every result row depends on its own request alone."""

    @property
    def quantizations(self) -> Sequence[str]:
        """GGUF names, such as Q4_1, of what `pack_blocks` accepts."""

    @property
    def num_packed_bytes(self) -> int:
        """Memory of all weights packed by these kernels."""

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """A copy of `weight` float32[columns, depth]."""

    def pack_blocks(self, blocks: torch.Tensor, quantization: str) -> PackedWeight:
        """A copy of `blocks` uint8[columns, bytes of a row], which stays quantised in memory.

        Whatever is computed with it has the bits of the float32 weight that the blocks stand for. Raises ValueError for
        another quantization, rows that are no whole blocks, and scales that are not finite.
        """

    def multiply(self, input: torch.Tensor, weight: PackedWeight, output: torch.Tensor) -> None:
        """Writes `output`[rows, columns] = `input`[rows, depth] times the transpose of a packed [columns, depth].

        Input and output are float32 with a contiguous last axis. Raises ValueError, before anything is written, when
        shapes contradict each other.
        """

    def silu_network(
        self, input: torch.Tensor, gate: PackedWeight, up: PackedWeight, down: PackedWeight, output: torch.Tensor
    ) -> None:
        """Writes `output` = down(silu(gate) * up) of packed [width, depth], [width, depth] and [columns, width].

        To the bit what `multiply` and `silu_multiply` give after one another; `input`, `output` and errors as there.
        """

    def gelu_tanh_network(
        self, input: torch.Tensor, gate: PackedWeight, up: PackedWeight, down: PackedWeight, output: torch.Tensor
    ) -> None:
        """`silu_network` with `gelu_tanh_multiply`."""

    def gather_rows(self, weight: PackedWeight, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Writes `output`[num_rows, depth] = the rows int64[num_rows] of a packed [columns, depth].

        Raises ValueError, before anything is written, for a row outside the weight.
        """

    def store_rows(self, rows: torch.Tensor, locations: torch.Tensor, buffer: torch.Tensor) -> None:
        """Writes `buffer`[locations[i]] = rows[i], the later of two at one place.

        `rows`: float32[num_rows, ...], `buffer`: float32[num_locations, ...], each of two axes or three and rows
        contiguous; `locations`: int64[num_rows]. Raises ValueError, before anything is written, when shapes contradict
        each other or a location is outside the buffer.
        """

    def rms_norm(self, input: torch.Tensor, weight: torch.Tensor, eps: float, output: torch.Tensor) -> None:
        """Writes `output` = `input`[rows, width] scaled to unit mean square per row, times `weight`[width].

        Source: Zhang and Sennrich 2019, "Root mean square layer normalization".
        """

    def add_rms_norm(
        self, addend: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, output: torch.Tensor
    ) -> None:
        """Adds `addend`[rows, width] to `total` and writes `output` = what `rms_norm` makes of the sums, to the bit."""

    def silu_multiply(self, input: torch.Tensor, output: torch.Tensor) -> None:
        """Writes `output`[rows, width] = silu(gate) * up, where `input`[rows, 2 * width] is gate and up side by side.

        Source: Shazeer 2020, "GLU variants improve transformer" (SwiGLU).
        """

    def gelu_tanh_multiply(self, input: torch.Tensor, output: torch.Tensor) -> None:
        """Writes `output`[rows, width] = gelu(gate) * up, where `input`[rows, 2 * width] is gate and up side by side.

        Source: Shazeer 2020, "GLU variants improve transformer" (GEGLU), with the tanh approximation of Hendrycks and
        Gimpel 2016.
        """

    def sigmoid_multiply(self, input: torch.Tensor, output: torch.Tensor) -> None:
        """Writes `output`[rows, width] = sigmoid(gate) * up, where `input`[rows, 2 * width] is gate beside up."""

    def rotate(self, input: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, output: torch.Tensor) -> None:
        """Writes `output` = `input`[rows, num_heads * head_dim], dimension i of each head turned with i + head_dim / 2.

        `cosines`, `sines`: float32[rows, head_dim / 2]. Source: Su et al. 2021, "RoFormer", half-split as in Llama.
        """

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        locations: torch.Tensor,
        key_rows: torch.Tensor,
        value_rows: torch.Tensor,
    ) -> None:
        """Turns each token's query and key heads in place and leaves its keys and values in the cache.

        `heads`: float32[num_tokens, num_heads + 2 * num_kv_heads, head_dim], those of query, key and value in this
        order, the heads of a token contiguous. `cosines`, `sines`: float32[num_tokens, half]; dimension i of a head
        turns with i + half, as in `rotate`, those from 2 * half on do not. `key_rows`, `value_rows`:
        float32[num_locations, num_kv_heads, head_dim], rows contiguous. `locations`: int64[num_tokens], -1 for a token
        that is not stored; no two tokens have one place, except where nobody reads. Raises ValueError, before anything
        is written, when shapes contradict each other or a location is outside the cache.
        """

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        page_table: torch.Tensor,
        begins: torch.Tensor,
        lengths: torch.Tensor,
        output: torch.Tensor,
        scale: float,
        window_left_tokens: int | None = None,
        log_sum_exp: torch.Tensor | None = None,
    ) -> None:
        """Causal grouped-query attention for every token of the batch, keys and values read through a page table.

        `query`, `output`: float32[num_tokens, num_heads, head_dim], the tokens of all rows concatenated. `key_pages`,
        `value_pages`: float32[num_pages, kernel_page_size, num_kv_heads, head_dim], already holding the batch's own
        rows. `page_table`: int32[num_rows, max_pages]. `begins`, `lengths`: int32[num_rows]; token t of row r is at
        position begins[r] + t and sees the positions up to its own, of those before it only the last
        `window_left_tokens` unless that is None. What no token sees is not read into any result, whatever its page
        holds. With `log_sum_exp` float32[num_tokens, num_heads] a page may be absent, -1: attention is over the rows
        of the others, and `log_sum_exp` becomes the logarithm of the sum of their exponentiated scores, -inf (and
        `output` 0) where a token sees none of them. Raises ValueError, before anything is written, when shapes, lengths
        or page ids contradict each other.
        """

    def select_rows(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        key_pages: torch.Tensor,
        page_table: torch.Tensor,
        begins: torch.Tensor,
        lengths: torch.Tensor,
        selected: torch.Tensor,
    ) -> None:
        """Writes for every token the positions up to its own that its index heads find worth most.

        A position is worth the sum over heads of weight * max(0, query . key). `query`: float32[num_tokens, num_heads,
        head_dim]; `weights`: float32[num_tokens, num_heads]; `key_pages`: float32[num_pages, kernel_page_size,
        head_dim], already holding the batch's own rows; tables, begins and lengths as in `attend`. `selected`:
        int32[num_tokens, num_selected], ascending, -1 behind the last where a token sees fewer; of equals the earlier
        one is chosen. Raises ValueError, before anything is written, when shapes, lengths or page ids contradict each
        other. Source: DeepSeek-AI 2025, "DeepSeek-V3.2".
        """

    def find_largest(self, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Writes to `places` int64[num_rows] where the largest number of each of `rows` float32[num_rows, width] is.

        The first of equals, and the first NaN where there is one. Raises ValueError for rows of no numbers.
        """

    def causal_conv(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        input_blocks: torch.Tensor,
        output_blocks: torch.Tensor,
        checkpoint_blocks: torch.Tensor,
        checkpoint_lengths: torch.Tensor,
        lengths: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Writes `output` = silu of every channel's causal convolution, and leaves the last inputs as states.

        `input`, `output`: float32[num_tokens, channels], the tokens of all rows concatenated. `weight`: float32[width,
        channels], the newest token last. `states`: float32[num_blocks, width - 1, channels], the inputs before a
        position, oldest first. Block arrays and `lengths`: int32[num_rows] as in StateBlocks: a row continues from its
        input block (-1: from zeros), leaves the state after `checkpoint_lengths` tokens in its checkpoint block (-1:
        nowhere) and the last one in its output block, which may be its input. Raises ValueError, before anything is
        written, when shapes, lengths or block ids contradict each other, or a row writes another row's block.
        """

    def gated_delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: torch.Tensor,
        step_bias: torch.Tensor,
        rate: torch.Tensor,
        strength_logits: torch.Tensor,
        states: torch.Tensor,
        input_blocks: torch.Tensor,
        output_blocks: torch.Tensor,
        checkpoint_blocks: torch.Tensor,
        checkpoint_lengths: torch.Tensor,
        lengths: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """The delta rule over a state S[key_dim, value_dim] per head, token by token.

        S decays by d = exp(-rate * softplus(step + step_bias)), then takes up key x (strength * (value - S key)) with
        strength = sigmoid(strength_logits), then `output` = S query. Queries and keys are brought to unit length first
        (a query to key_dim ** -0.5). `query`, `key`: float32[num_tokens, num_key_heads, key_dim]; value head h uses key
        head h * num_key_heads // num_heads. `value`, `output`: float32[num_tokens, num_heads, value_dim]. `step`:
        float32[num_tokens, num_heads, 1], or [.., key_dim] where every row of S decays by itself; `step_bias`:
        float32[num_heads, the same]; `rate`: float32[num_heads]; `strength_logits`: float32[num_tokens, num_heads].
        `states`: float32[num_blocks, num_heads, key_dim, value_dim]. Blocks, lengths and errors as in `causal_conv`.
        Source: Yang et al. 2024, "Gated delta networks"; Kimi Team 2025, "Kimi Linear", for a decay per row.
        """

    def selective_scan(
        self,
        value: torch.Tensor,
        key: torch.Tensor,
        query: torch.Tensor,
        step: torch.Tensor,
        step_bias: torch.Tensor,
        rate: torch.Tensor,
        skip: torch.Tensor,
        min_step: float,
        max_step: float,
        states: torch.Tensor,
        input_blocks: torch.Tensor,
        output_blocks: torch.Tensor,
        checkpoint_blocks: torch.Tensor,
        checkpoint_lengths: torch.Tensor,
        lengths: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """The selective state space of Mamba-2 over a state S[key_dim, value_dim] per head, token by token.

        With dt = softplus(step + step_bias) clamped to [min_step, max_step], S decays by exp(-rate * dt) and takes up
        key x (dt * value); then `output` = S query + skip * value. In the paper's words `value` is x, `key` B, `query`
        C, rate -A and skip D. `value`, `output`: float32[num_tokens, num_heads, value_dim]; `key`, `query`:
        float32[num_tokens, num_groups, key_dim], shared by num_heads // num_groups heads. `step`: float32[num_tokens,
        num_heads, 1]; `step_bias`: float32[num_heads, 1]; `rate`, `skip`: float32[num_heads]. `states`, blocks, lengths
        and errors as in `gated_delta_rule`. Source: Dao and Gu 2024, "Transformers are SSMs".
        """
