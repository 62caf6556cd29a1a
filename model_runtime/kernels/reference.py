"""The kernels in plain torch operations and float64: slow, obvious, and the oracle of the native ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch.nn.functional import gelu, silu, softplus

from model_runtime.gguf.dequantize import dequantize
from model_runtime.kernels.interface import PackedWeight
from model_runtime.kernels.reference_states import conv_step, decay_of, delta_step, run_rows, scan_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainWeight:
    """A weight as it is: float32[num_columns, depth]."""

    rows: torch.Tensor

    @property
    def num_columns(self) -> int:
        return self.rows.shape[0]

    @property
    def depth(self) -> int:
        return self.rows.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes


class ReferenceKernels:
    """`Kernels` that gather each row's keys and values, and expand blocks once."""

    def __init__(self) -> None:
        self._num_packed_bytes = 0

    @property
    def quantizations(self) -> Sequence[str]:
        return tuple(kind.name for kind in GGMLQuantizationType)

    @property
    def num_packed_bytes(self) -> int:
        return self._num_packed_bytes

    def pack(self, weight: torch.Tensor) -> PlainWeight:
        self._num_packed_bytes += weight.nbytes
        return PlainWeight(rows=weight.clone())

    def pack_blocks(self, blocks: torch.Tensor, quantization: str) -> PlainWeight:
        kind = GGMLQuantizationType[quantization]
        weights_per_block, block_bytes = GGML_QUANT_SIZES[kind]
        depth = blocks.shape[1] // block_bytes * weights_per_block
        return self.pack(dequantize(blocks.contiguous().flatten().numpy(), kind, (blocks.shape[0], depth)))

    def multiply(self, input: torch.Tensor, weight: PackedWeight, output: torch.Tensor) -> None:
        output.copy_(input.double() @ plain_rows(weight).double().T)

    def silu_network(
        self, input: torch.Tensor, gate: PackedWeight, up: PackedWeight, down: PackedWeight, output: torch.Tensor
    ) -> None:
        gated = input.new_empty((input.shape[0], gate.num_columns))
        self.silu_multiply(self._side_by_side(input, gate, up), gated)
        self.multiply(gated, down, output)

    def gelu_tanh_network(
        self, input: torch.Tensor, gate: PackedWeight, up: PackedWeight, down: PackedWeight, output: torch.Tensor
    ) -> None:
        gated = input.new_empty((input.shape[0], gate.num_columns))
        self.gelu_tanh_multiply(self._side_by_side(input, gate, up), gated)
        self.multiply(gated, down, output)

    def _side_by_side(self, input: torch.Tensor, first: PackedWeight, second: PackedWeight) -> torch.Tensor:
        products = input.new_empty((input.shape[0], first.num_columns + second.num_columns))
        self.multiply(input, first, products[:, : first.num_columns])
        self.multiply(input, second, products[:, first.num_columns :])
        return products

    def gather_rows(self, weight: PackedWeight, rows: torch.Tensor, output: torch.Tensor) -> None:
        if not bool(((rows >= 0) & (rows < weight.num_columns)).all()):
            raise ValueError("linear: row ids must name rows of the weight")
        output.copy_(plain_rows(weight)[rows])

    def store_rows(self, rows: torch.Tensor, locations: torch.Tensor, buffer: torch.Tensor) -> None:
        if not bool(((locations >= 0) & (locations < buffer.shape[0])).all()):
            raise ValueError("rows: locations must name rows of buffer")
        buffer.index_copy_(0, locations, rows)

    def rms_norm(self, input: torch.Tensor, weight: torch.Tensor, eps: float, output: torch.Tensor) -> None:
        mean_square = input.double().square().mean(-1, keepdim=True)
        output.copy_(input * torch.rsqrt(mean_square + eps) * weight)

    def add_rms_norm(
        self, addend: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, output: torch.Tensor
    ) -> None:
        total.add_(addend)
        self.rms_norm(total, weight, eps, output)

    def silu_multiply(self, input: torch.Tensor, output: torch.Tensor) -> None:
        gate, up = input.double().chunk(2, dim=-1)
        output.copy_(silu(gate) * up)

    def gelu_tanh_multiply(self, input: torch.Tensor, output: torch.Tensor) -> None:
        gate, up = input.double().chunk(2, dim=-1)
        output.copy_(gelu(gate, approximate="tanh") * up)

    def sigmoid_multiply(self, input: torch.Tensor, output: torch.Tensor) -> None:
        gate, up = input.double().chunk(2, dim=-1)
        output.copy_(torch.sigmoid(gate) * up)

    def rotate(self, input: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, output: torch.Tensor) -> None:
        heads = input.double().reshape(input.shape[0], -1, 2, cosines.shape[1])  # [rows, num_heads, 2, head_dim / 2]
        first, second = heads.unbind(dim=2)
        cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
        turned = torch.stack((first * cosines - second * sines, second * cosines + first * sines), dim=2)
        output.copy_(turned.flatten(1))

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        locations: torch.Tensor,
        key_rows: torch.Tensor,
        value_rows: torch.Tensor,
    ) -> None:
        num_kv_heads = key_rows.shape[1]
        turning = heads[:, :-num_kv_heads, : 2 * cosines.shape[1]]
        turned = torch.empty_like(turning, memory_format=torch.contiguous_format)
        self.rotate(turning.flatten(1), cosines, sines, turned.flatten(1))
        turning.copy_(turned)
        held = locations != -1
        self.store_rows(heads[held, -2 * num_kv_heads : -num_kv_heads], locations[held], key_rows)
        self.store_rows(heads[held, -num_kv_heads:], locations[held], value_rows)

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
        end = 0
        for row, (position, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            begin, end = end, end + length
            pages = page_table[row].long()
            first_key = 0 if window_left_tokens is None else max(0, position - window_left_tokens)
            seen = slice(first_key, position + length)
            # An absent page, -1, is gathered as the last one; its rows are left out.
            present = (pages >= 0).repeat_interleave(key_pages.shape[1])[seen]
            output[begin:end], sums = _attend_row(
                query[begin:end],
                key_pages[pages].flatten(0, 1)[seen],
                value_pages[pages].flatten(0, 1)[seen],
                present,
                scale,
                window_left_tokens,
            )
            if log_sum_exp is not None:
                log_sum_exp[begin:end] = sums

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
        selected.fill_(-1)
        token = 0
        for row, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            keys = key_pages[page_table[row].long()].flatten(0, 1).double()  # [positions, head_dim]
            for position in range(begin, begin + length):
                found = torch.relu(query[token].double() @ keys[: position + 1].T)  # [num_heads, positions]
                worth = weights[token].double() @ found
                best = torch.sort(worth, descending=True, stable=True).indices[: selected.shape[1]]
                selected[token, : best.shape[0]] = best.sort().values.int()
                token += 1

    def find_largest(self, rows: torch.Tensor, places: torch.Tensor) -> None:
        places.copy_(torch.from_numpy(rows.cpu().numpy().argmax(axis=1)))

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
        step = conv_step(input, weight, bias, output)
        run_rows(states, input_blocks, output_blocks, checkpoint_blocks, checkpoint_lengths, lengths, step)

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
        strength = torch.sigmoid(strength_logits.double())
        rule = delta_step(query, key, value, decay_of(step, step_bias, rate), strength, output)
        run_rows(states, input_blocks, output_blocks, checkpoint_blocks, checkpoint_lengths, lengths, rule)

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
        dt = softplus(step.double() + step_bias).squeeze(-1).clamp(min_step, max_step)
        scan = scan_step(value, key, query, dt, rate, skip, output)
        run_rows(states, input_blocks, output_blocks, checkpoint_blocks, checkpoint_lengths, lengths, scan)


def plain_rows(weight: PackedWeight) -> torch.Tensor:
    """The rows of a weight that these kernels packed. Raises ValueError for another's."""
    if not isinstance(weight, PlainWeight):
        raise ValueError("linear: weight must be packed by these kernels")
    return weight.rows


def _attend_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    present: torch.Tensor,
    scale: float,
    window_left_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like query, and float64[tokens, num_heads]; only `present` bool[keys] are attended to."""
    num_tokens, num_keys = query.shape[0], keys.shape[0]
    group = query.shape[1] // keys.shape[1]
    keys, values = (rows.double().repeat_interleave(group, dim=1) for rows in (keys, values))
    scores = torch.einsum("thd,khd->htk", query.double(), keys) * scale  # [num_heads, tokens, keys]
    visible = torch.ones(num_tokens, num_keys, dtype=torch.bool).tril(num_keys - num_tokens)
    if window_left_tokens is not None:
        visible = visible.triu(num_keys - num_tokens - window_left_tokens)
    scores = scores.masked_fill(~(visible & present), float("-inf"))
    # A token that sees nothing has only -inf to weigh, which softmax makes NaN.
    weights = scores.softmax(dim=-1).masked_fill(~visible.logical_and(present).any(dim=-1)[:, None], 0.0)
    values = values.masked_fill(~present[:, None, None], 0.0)
    return torch.einsum("htk,khd->thd", weights, values).to(query.dtype), scores.logsumexp(dim=-1).T
