"""The gradient of an additive mask of megafx::attention on CUDA; attention_backward_triton.py has the formula.

One program a tile of queries and keys, summed over the batches and heads that share a mask, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.attention.attention_backward_triton import query_config
from megafx.kernels.attention.attention_bits_triton import keep_tile
from megafx.kernels.attention.attention_reference import Inputs
from megafx.kernels.attention.attention_triton import (
    Prepared,
    coordinates,
    described,
    score_tile,
    takes_descriptors,
    tile,
)
from megafx.kernels.common.op import launch
from megafx.kernels.common.tiles_triton import LOG2E


@triton.jit(do_not_specialize=["op_id", "threshold"])
def _mask_gradient(
    Q, K, V, DO,  # IN
    DM,  # [mask batches, mask heads, S, T] fp32 OUT
    LSE, DELTA,  # [b, H, S] fp32 IN
    MASK, KEYS, SEGMENTS, SEED, BATCHES, HEADS, QUERIES,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, db, dh, ds, mask_b, mask_h, mask_q, mask_k,
    keys_b, ids_b, H, G, S, T, window, op_id, threshold, rescale, factor, cap, batches, heads, mask_batches, mask_heads,
    E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries and keys, summed over the `batches` x `heads` that share one mask."""
    row_blocks = tl.cdiv(S, BM)
    key_blocks = tl.cdiv(T, BN)
    pid = tl.program_id(0)
    q0 = pid % row_blocks * BM
    n0 = pid // row_blocks % key_blocks * BN
    mask = pid // row_blocks // key_blocks
    qi = q0 + tl.arange(0, BM)
    ki = n0 + tl.arange(0, BN)[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for i in range(batches * heads):
        b = mask // mask_heads * (mask_batches > 1) + i // heads
        h = mask % mask_heads + i % heads
        bh = b * H + h
        kv = h // G
        qp, head, batch, k0, k1, below = coordinates(SEED, BATCHES, HEADS, QUERIES, b, h, qi, S, op_id, threshold, DROP)
        mask_at = b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
        at = bh.to(tl.int64) * S + qi
        lse = tl.load(LSE + at, mask=qi < S, other=float("inf")) * LOG2E
        delta = tl.load(DELTA + at, mask=qi < S, other=0.0)
        q = tile(Q, b, h, q0, qb, qh, qs, S, E, EP, BM, TMA)
        k = tile(K, b, kv, n0, kb, kh, ks, T, E, EP, BN, TMA)
        x, slope = score_tile(
            tl.dot(q, tl.trans(k), input_precision=PRECISION), qi[:, None], qp[:, None], ki,
            MASK, mask_at, mask_q, mask_k, KEYS, b.to(tl.int64) * keys_b, SEGMENTS, b.to(tl.int64) * ids_b, S, T,
            window, factor, cap,
            CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, True,
        )  # fmt: skip
        w = tl.math.exp2(x - lse[:, None])
        do = tile(DO, b, h, q0, db, dh, ds, S, F, FP, BM, TMA)
        v = tile(V, b, kv, n0, vb, vh, vs, T, F, FP, BN, TMA)
        dw = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if DROP:
            dw = tl.where(keep_tile(n0, qp.to(tl.uint32), head, batch, k0, k1, below, BM, BN), dw, 0.0)
        found = w * (dw - delta[:, None])
        if KIND >= 3:
            found = tl.where(slope < 0.0, 0.0, found)
        total += found
    at = DM + mask.to(tl.int64) * S * T + qi.to(tl.int64)[:, None] * T + ki
    tl.store(at, total * rescale, mask=(qi[:, None] < S) & (ki < T))


def mask_backward(grad: Tensor, x: Inputs, out: Tensor, lse: Tensor) -> Tensor:
    """Of an additive mask: [b, t] or 4-D."""
    c, mask = Prepared(x), x.mask
    assert mask is not None
    if c.empty:
        return torch.zeros(mask.shape, dtype=mask.dtype, device=mask.device)
    whole = mask[:, None, None] if mask.dim() == 2 else mask
    batches, heads = whole.shape[:2]
    delta = (grad.float() * out.float()).sum(-1) * c.share
    made = torch.empty(batches, heads, c.s, c.t, dtype=torch.float32, device=mask.device)
    grad = c.rows(grad)
    tma = takes_descriptors(c.q, c.k, c.v, grad)
    config = dict(BM=64, BN=64, TMA=tma, DROP=c.dropped, num_warps=query_config(c)["num_warps"])
    ep, fp = c.flags["EP"], c.flags["FP"]
    launch(
        _mask_gradient, (triton.cdiv(c.s, 64) * triton.cdiv(c.t, 64) * batches * heads,), c.q,
        described(c.q, 64, ep, tma), described(c.k, 64, ep, tma), described(c.v, 64, fp, tma),
        described(grad, 64, fp, tma), made, lse, delta, c.mask, c.keys, c.segments.ids, c.seed, *c.maps,
        *c.q.stride()[:3], *c.k.stride()[:3], *c.v.stride()[:3], *grad.stride()[:3], *c.mask_strides,
        c.keys_stride, c.segments.strides[0], *c.sizes, *c.factors, c.b // batches, c.h // heads, batches, heads,
        **c.flags, **config,
    )  # fmt: skip
    return made.sum_to_size(whole.shape).view(mask.shape).to(mask.dtype)
