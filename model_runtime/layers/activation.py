"""Gated activations that are no kernel of their own."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu


def gelu_tanh_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of float32[rows, 2 * width], gate and up side by side -> float32[rows, width].

    Rows are computed one by one, since the two halves of a row are no neighbours of the next row's: a row's result does
    not depend on the rows around it. Source: Shazeer 2020, "GLU variants improve transformer" (GEGLU), with the tanh
    approximation of Hendrycks and Gimpel 2016.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh").mul_(up)
