"""The stream between the blocks of a decoder."""

from __future__ import annotations

import torch

from model_runtime.kernels import _native
from model_runtime.layers.norm import RmsNorm
from model_runtime.layers.residual import ResidualStream

WIDTH = 24


def test_a_norm_reads_everything_that_was_added() -> None:
    torch.manual_seed(6)
    begin, *outputs = torch.randn(5, 3, WIDTH).unbind()
    norm = RmsNorm(torch.randn(WIDTH), 1e-5, _native.CpuKernels(1))
    stream, expected = ResidualStream(begin.clone()), begin.clone()
    assert torch.equal(stream.normed(norm), norm(expected))
    assert torch.equal(stream.normed(norm), norm(expected)), "reading changes nothing"
    for added in ((outputs[0],), (outputs[1],), (outputs[2], outputs[3])):
        for output in added:
            stream.add(output)
            expected += output
        assert torch.equal(stream.normed(norm), norm(expected))
        assert torch.equal(stream.normed(norm), norm(expected)), "nothing is added twice"
