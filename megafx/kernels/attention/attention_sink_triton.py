"""The gradient of a sink of megafx::attention on CUDA; attention.py has the formula.

    dsink = - sum over batch and queries of exp(sink - lse) sum_f(grad * out)

lse has the sink in it. A program sums BM queries of one head; then one program a head sums these, in order: no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common.op import launch
from megafx.kernels.common.tiles_triton import power_of_2


@triton.jit
def _sink_gradient(
    DO, OUT,  # [b, H, S, F] IN
    LSE,  # [b, H, S] fp32 IN
    SINK,  # [H] IN
    SUMS,  # [H, b, S / BM] fp32 OUT
    db, dh, ds, ob, oh, os, B, H, S,
    F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(S, BM)
    pid = tl.program_id(0)
    block = pid % blocks
    b = pid // blocks % B
    h = pid // blocks // B
    qi = block * BM + tl.arange(0, BM)
    column = tl.arange(0, FP)[None, :]
    inside = (qi[:, None] < S) & (column < F)
    do = DO + b.to(tl.int64) * db + h.to(tl.int64) * dh + qi.to(tl.int64)[:, None] * ds + column
    out = OUT + b.to(tl.int64) * ob + h.to(tl.int64) * oh + qi.to(tl.int64)[:, None] * os + column
    product = tl.load(do, mask=inside, other=0.0).to(tl.float32) * tl.load(out, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(LSE + (b * H + h).to(tl.int64) * S + qi, mask=qi < S, other=float("inf"))
    weight = tl.exp(tl.load(SINK + h).to(tl.float32) - lse)
    tl.store(SUMS + pid, tl.sum(weight * tl.sum(product, 1), 0))


@triton.jit
def _sum_of_heads(
    SUMS,  # [H, n] fp32 IN
    DSINK,  # [H] OUT
    n, BN: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    total = tl.zeros([BN], tl.float32)
    for start in range(0, n, BN):
        i = start + tl.arange(0, BN)
        total += tl.load(SUMS + h.to(tl.int64) * n + i, mask=i < n, other=0.0)
    tl.store(DSINK + h, (-tl.sum(total, 0)).to(DSINK.dtype.element_ty))


def sink_backward(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor, **config: Any) -> Tensor:
    """[b, nq, s, f], the same, [b, nq, s] and [nq] -> [nq]. config: BM, num_warps."""
    b, h, s, f = out.shape
    grad, out = (x if x.stride(-1) == 1 or f == 1 else x.contiguous() for x in (grad, out))
    config = {"BM": 64, "num_warps": 4, **config}
    blocks = triton.cdiv(s, config["BM"])
    sums = torch.empty(h, b * blocks, dtype=torch.float32, device=out.device)
    launch(
        _sink_gradient, (b * h * blocks,), out,
        grad, out, lse.contiguous(), sink.contiguous(), sums, *grad.stride()[:3], *out.stride()[:3], b, h, s,
        F=f, FP=power_of_2(f), **config,
    )  # fmt: skip
    found = torch.empty_like(sink)
    launch(_sum_of_heads, (h,), out, sums, found, b * blocks, BN=256)
    return found
