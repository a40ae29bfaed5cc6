"""Covers: kernels/experts/grouped_mlp.py on CUDA, where the library's grouped products compute it. Its formulas:
equivalence/experts/test_experts.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megafx.kernels.experts import grouped_mlp as module

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
UNIT = "v0 = add.Tensor(h0, e0); v1 = silu(v0); v2 = mul.Tensor(v1, h1); v3 = mul.Tensor(v2, r0); v3"
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def results(dtype: torch.dtype, device: str, width: int, ranges: Any) -> list[Tensor]:
    """The result and every gradient, from operands that are those of bf16 in any dtype."""
    torch.manual_seed(0)
    experts, rows, ffn = 5, 71, 40
    shapes = [(rows, width), (experts, width, ffn), (experts, width, ffn), (experts, ffn, width), (experts, width)]
    shapes += [(experts, ffn), (rows, 1)]
    leaves = [torch.randn(s).bfloat16().to(device, dtype).requires_grad_() for s in shapes]
    x, one, two, down, bias, stack, row = leaves
    starts, ends = (torch.tensor(r, device=device) for r in ranges)
    y = torch.ops.megafx.grouped_mlp(x, starts, ends, [one, two], down, bias, [stack], [row], UNIT)
    grad = torch.randn(rows, width).bfloat16().to(device, dtype)
    return [y, *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("width", [32, 20, 7])  # rows of 7 and of 20 two-byte numbers are none of the library's
@pytest.mark.parametrize(
    "ranges",
    [
        ([0, 11, 11, 30, 64], [11, 11, 30, 64, 71]),
        ([9, 30, 31, 31, 50], [30, 31, 31, 50, 60]),  # the rows of a rank: others before and after
        ([40, 44, 71, 0, 0], [44, 71, 71, 0, 0]),  # the last two are padding
    ],
)
def test_cuda_is_near_the_formula(dtype: torch.dtype, width: int, ranges: Any) -> None:
    found = results(dtype, "cuda", width, ranges)
    again = results(dtype, "cuda", width, ranges)
    wanted = results(torch.float64, "cpu", width, ranges)
    assert len(found) == len(wanted) == 8 and all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    for ours, exact in zip(found, wanted, strict=True):
        error = float((ours.cpu().double() - exact).norm() / exact.norm())
        assert error < LIMITS[dtype], (tuple(exact.shape), error)


def test_nothing_is_read_on_the_host() -> None:
    """Forward and backward only launch; nothing waits for the device."""
    dtype, ranges = torch.bfloat16, ([0, 11, 11, 30, 64], [11, 11, 30, 64, 71])
    x, ups = torch.randn(71, 32, device="cuda", dtype=dtype), torch.randn(5, 32, 40, device="cuda", dtype=dtype)
    down, stack = torch.randn(5, 40, 32, device="cuda", dtype=dtype), torch.randn(5, 40, device="cuda", dtype=dtype)
    starts, ends = (torch.tensor(r, device="cuda") for r in ranges)
    row = torch.ones(71, 1, device="cuda", dtype=dtype)

    def both() -> None:
        module.grouped_mlp(x, starts, ends, [ups, ups], down, None, [stack], [row], UNIT)
        module.grouped_mlp_backward(x, x, starts, ends, [ups, ups], down, [stack], [row], UNIT, True)

    both()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode(before)
