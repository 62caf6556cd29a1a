import torch

from model_runtime.kernels import interface

class PackedWeight:
    @property
    def num_columns(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

class CpuKernels:
    def __init__(self, num_threads: int, instruction_set: str = "") -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def instruction_set(self) -> str: ...
    @property
    def quantizations(self) -> list[str]: ...
    @property
    def num_packed_bytes(self) -> int: ...
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
    ) -> None: ...
    def pack(self, weight: torch.Tensor) -> PackedWeight: ...
    def pack_blocks(self, blocks: torch.Tensor, quantization: str) -> PackedWeight: ...
    def gather_rows(self, weight: interface.PackedWeight, rows: torch.Tensor, output: torch.Tensor) -> None: ...
    def store_rows(self, rows: torch.Tensor, locations: torch.Tensor, buffer: torch.Tensor) -> None: ...
    def multiply(self, input: torch.Tensor, weight: interface.PackedWeight, output: torch.Tensor) -> None: ...
    def silu_network(
        self,
        input: torch.Tensor,
        gate: interface.PackedWeight,
        up: interface.PackedWeight,
        down: interface.PackedWeight,
        output: torch.Tensor,
    ) -> None: ...
    def gelu_tanh_network(
        self,
        input: torch.Tensor,
        gate: interface.PackedWeight,
        up: interface.PackedWeight,
        down: interface.PackedWeight,
        output: torch.Tensor,
    ) -> None: ...
    def rms_norm(self, input: torch.Tensor, weight: torch.Tensor, eps: float, output: torch.Tensor) -> None: ...
    def add_rms_norm(
        self, addend: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, output: torch.Tensor
    ) -> None: ...
    def silu_multiply(self, input: torch.Tensor, output: torch.Tensor) -> None: ...
    def gelu_tanh_multiply(self, input: torch.Tensor, output: torch.Tensor) -> None: ...
    def sigmoid_multiply(self, input: torch.Tensor, output: torch.Tensor) -> None: ...
    def rotate(self, input: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, output: torch.Tensor) -> None: ...
    def rotate_and_store(
        self,
        heads: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        locations: torch.Tensor,
        key_rows: torch.Tensor,
        value_rows: torch.Tensor,
    ) -> None: ...
    def select_rows(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        key_pages: torch.Tensor,
        page_table: torch.Tensor,
        begins: torch.Tensor,
        lengths: torch.Tensor,
        selected: torch.Tensor,
    ) -> None: ...
    def find_largest(self, rows: torch.Tensor, places: torch.Tensor) -> None: ...
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
    ) -> None: ...
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
    ) -> None: ...
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
    ) -> None: ...

def instruction_sets() -> list[str]: ...
