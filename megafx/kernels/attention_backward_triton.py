"""megafx::attention backward on CUDA: gradients of q, of k and v, of an additive mask. attention.py has the formula.

    delta = sum_f(out * grad);  dw = keep / (1 - p) * (grad v^T);  ds = w (dw - delta);  dq = scale ds k;  dk = scale ds^T q
    dv = (w keep / (1 - p))^T grad;  dmask = ds before the slope of the soft-cap, summed over the dims it is broadcast along

The weights and their dropout are computed again, from q, k, the saved log-sum-exp and the seed. `_query_gradient` goes by
rows, makes delta on the way and leaves it for `_key_gradient`, which goes by keys and sums over the query heads that share
them, in order: no atomics. All tiles are queries by keys, also where the product needs them turned: a Philox call then
decides for keys of one thread, as in forward. (Keys by queries, a call spans four warps; with the decisions made once as
bits, and read, the backward took 0.15 to 0.2 ms longer at [4, 32, 2048, 128] and [32, 16, 1024, 64]. Measured: H200.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_reference import Options, heads_inside
from .attention_triton import (
    LOG2E,
    Call,
    coordinates,
    described,
    keep_tile,
    key_range,
    schedule,
    score_tile,
    takes_descriptors,
    tile,
)
from .op import launch

# -- dq


@triton.jit
def _query_tiles(
    dq, q, do, lse, delta, K, V, MASK, mask_at, b, kv, qi, qp, lo, hi,
    kb, kh, ks, vb, vh, vs, mask_q, mask_k, S, T, window, factor, cap, head, batch, k0, k1, below,
    E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    EDGE: tl.constexpr, DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        n0 = tl.multiple_of(n0, BN)
        k = tile(K, b, kv, n0, kb, kh, ks, T, E, EP, BN, TMA)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        v = tile(V, b, kv, n0, vb, vh, vs, T, F, FP, BN, TMA)
        dw = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ki = n0 + tl.arange(0, BN)[None, :]
        x, slope = score_tile(
            x, qi[:, None], qp[:, None], ki, MASK, mask_at, mask_q, mask_k, S, T, window, factor, cap,
            CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, EDGE,
        )  # fmt: skip
        w = tl.math.exp2(x - lse[:, None]) if SOFTCAP or KIND > 0 else tl.math.exp2(x * factor - lse[:, None])
        if DROP:
            dw = tl.where(keep_tile(n0, qp.to(tl.uint32), head, batch, k0, k1, below, BM, BN), dw, 0.0)
        ds = w * (dw - delta[:, None])
        if SOFTCAP:
            ds = ds * slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["op_id", "threshold"])
def _query_gradient(
    Q, K, V, DO,  # IN
    DQ,  # [b, H, S, E] OUT
    OUT,  # [b, H, S, F] IN
    LSE,  # [b, H, S] fp32 IN
    DELTA,  # [b, H, S] fp32 OUT
    MASK, SEED, BATCHES, HEADS, QUERIES,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, db, dh, ds, gb, gh, gs, ob, oh, os, mask_b, mask_h, mask_q, mask_k,
    H, G, S, T, window, op_id, threshold, rescale, factor, cap, share, scale,
    E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(S, BM)
    block, bh = schedule(tl.program_id(0), blocks, GROUP)
    q0 = (blocks - 1 - block) * BM
    b = bh // H
    h = bh % H
    kv = h // G
    qi = q0 + tl.arange(0, BM)
    qp, head, batch, k0, k1, below = coordinates(
        SEED, BATCHES, HEADS, QUERIES, b, h, qi, S, op_id, threshold, DROP
    )  # fmt: skip
    mask_at = b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
    q = tile(Q, b, h, q0, qb, qh, qs, S, E, EP, BM, TMA)
    do = tile(DO, b, h, q0, db, dh, ds, S, F, FP, BM, TMA)
    o = tile(OUT, b, h, q0, ob, oh, os, S, F, FP, BM, TMA)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1) * share
    at = bh.to(tl.int64) * S + qi
    tl.store(DELTA + at, delta, mask=qi < S)
    lse = tl.load(LSE + at, mask=qi < S, other=float("inf")) * LOG2E
    dq = tl.zeros([BM, EP], tl.float32)
    first, whole, last = key_range(q0, T, window, BM, BN, CAUSAL, WINDOW, QUERIES is not None)
    dq = _query_tiles(
        dq, q, do, lse, delta, K, V, MASK, mask_at, b, kv, qi, qp, first, whole,
        kb, kh, ks, vb, vh, vs, mask_q, mask_k, S, T, window, factor, cap, head, batch, k0, k1, below,
        E, EP, F, FP, BM, BN, CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, False, DROP, TMA, PRECISION, STAGES,
    )  # fmt: skip
    dq = _query_tiles(
        dq, q, do, lse, delta, K, V, MASK, mask_at, b, kv, qi, qp, tl.maximum(first, whole), last,
        kb, kh, ks, vb, vh, vs, mask_q, mask_k, S, T, window, factor, cap, head, batch, k0, k1, below,
        E, EP, F, FP, BM, BN, CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, True, DROP, TMA, PRECISION, STAGES,
    )  # fmt: skip
    columns = tl.arange(0, EP)[None, :]
    at = DQ + b.to(tl.int64) * gb + h.to(tl.int64) * gh + qi.to(tl.int64)[:, None] * gs + columns
    tl.store(at, (dq * (rescale * scale)).to(DQ.dtype.element_ty), mask=(qi[:, None] < S) & (columns < E))


# -- dk, dv


@triton.jit
def _key_tiles(
    dk, dv, k, v, Q, DO, LSE, DELTA, MASK, QUERIES, mask_at, bh, b, h, n0, lo, hi,
    qb, qh, qs, db, dh, ds, mask_q, mask_k, S, T, window, factor, cap, head, batch, k0, k1, below,
    E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    EDGE: tl.constexpr, DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for q0 in tl.range(lo, hi, BM, num_stages=STAGES):
        q0 = tl.multiple_of(q0, BM)
        q = tile(Q, b, h, q0, qb, qh, qs, S, E, EP, BM, TMA)
        do = tile(DO, b, h, q0, db, dh, ds, S, F, FP, BM, TMA)
        qi = q0 + tl.arange(0, BM)
        ki = n0 + tl.arange(0, BN)
        qp = qi
        if QUERIES is not None:
            qp = tl.load(QUERIES + qi, mask=qi < S, other=0)
        at = bh.to(tl.int64) * S + qi
        lse = tl.load(LSE + at, mask=qi < S, other=float("inf")) * LOG2E
        delta = tl.load(DELTA + at, mask=qi < S, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        x, slope = score_tile(
            x, qi[:, None], qp[:, None], ki[None, :], MASK, mask_at, mask_q, mask_k, S, T, window, factor, cap,
            CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, EDGE,
        )  # fmt: skip
        w = tl.math.exp2(x - lse[:, None]) if SOFTCAP or KIND > 0 else tl.math.exp2(x * factor - lse[:, None])
        dw = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        kept = w
        if DROP:
            kept = tl.where(keep_tile(n0, qp.to(tl.uint32), head, batch, k0, k1, below, BM, BN), w, 0.0)
        dv = tl.dot(tl.trans(kept.to(do.dtype)), do, dv, input_precision=PRECISION)
        dx = kept * dw - w * delta[:, None]  # one select serves both products
        if SOFTCAP:
            dx = dx * slope
        dk = tl.dot(tl.trans(dx.to(q.dtype)), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["op_id", "threshold"])
def _key_gradient(
    Q, K, V, DO,  # IN
    DK,  # [b, H / G, T, E] OUT
    DV,  # [b, H / G, T, F] OUT
    LSE, DELTA,  # [b, H, S] fp32 IN
    MASK, SEED, BATCHES, HEADS, QUERIES,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, db, dh, ds, eb, eh, es, fb, fh, fs, mask_b, mask_h, mask_q, mask_k,
    H, G, S, T, window, op_id, threshold, rescale, factor, cap, scale,
    E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(T, BN)
    block, bkv = schedule(tl.program_id(0), blocks, GROUP)  # block 0 has the most rows
    n0 = block * BN
    heads = H // G
    b = bkv // heads
    kv = bkv % heads
    k = tile(K, b, kv, n0, kb, kh, ks, T, E, EP, BN, TMA)
    v = tile(V, b, kv, n0, vb, vh, vs, T, F, FP, BN, TMA)
    dk = tl.zeros([BN, EP], tl.float32)
    dv = tl.zeros([BN, FP], tl.float32)
    lo = 0
    hi = S
    whole = 0  # rows [whole, hi) see every key of the block
    if QUERIES is not None:
        whole = S
    else:
        if CAUSAL:
            lo = tl.minimum(n0 // BM * BM, S)
            whole = tl.minimum(tl.cdiv(n0 + BN - 1, BM) * BM, S)
        if WINDOW:
            lo = tl.maximum(lo, (tl.maximum(0, n0 - window + 1)) // BM * BM)
            hi = tl.minimum(S, n0 + BN - 1 + window)
            whole = hi
    for g in range(G):
        h = kv * G + g
        bh = b * H + h
        _, head, batch, k0, k1, below = coordinates(
            SEED, BATCHES, HEADS, QUERIES, b, h, tl.arange(0, BM), S, op_id, threshold, DROP
        )  # fmt: skip
        mask_at = b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
        dk, dv = _key_tiles(
            dk, dv, k, v, Q, DO, LSE, DELTA, MASK, QUERIES, mask_at, bh, b, h, n0, lo, whole,
            qb, qh, qs, db, dh, ds, mask_q, mask_k, S, T, window, factor, cap, head, batch, k0, k1, below,
            E, EP, F, FP, BM, BN, CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, True, DROP, TMA, PRECISION, STAGES,
        )  # fmt: skip
        dk, dv = _key_tiles(
            dk, dv, k, v, Q, DO, LSE, DELTA, MASK, QUERIES, mask_at, bh, b, h, n0, tl.maximum(lo, whole), hi,
            qb, qh, qs, db, dh, ds, mask_q, mask_k, S, T, window, factor, cap, head, batch, k0, k1, below,
            E, EP, F, FP, BM, BN, CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, False, DROP, TMA, PRECISION, STAGES,
        )  # fmt: skip
    ki = n0 + tl.arange(0, BN)
    columns = tl.arange(0, EP)[None, :]
    at = DK + b.to(tl.int64) * eb + kv.to(tl.int64) * eh + ki.to(tl.int64)[:, None] * es + columns
    tl.store(at, (dk * (rescale * scale)).to(DK.dtype.element_ty), mask=(ki[:, None] < T) & (columns < E))
    columns = tl.arange(0, FP)[None, :]
    at = DV + b.to(tl.int64) * fb + kv.to(tl.int64) * fh + ki.to(tl.int64)[:, None] * fs + columns
    tl.store(at, (dv * rescale).to(DV.dtype.element_ty), mask=(ki[:, None] < T) & (columns < F))


# -- an additive mask


@triton.jit(do_not_specialize=["op_id", "threshold"])
def _mask_gradient(
    Q, K, V, DO,  # IN
    DM,  # [mask batches, mask heads, S, T] fp32 OUT
    LSE, DELTA,  # [b, H, S] fp32 IN
    MASK, SEED, BATCHES, HEADS, QUERIES,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, db, dh, ds, mask_b, mask_h, mask_q, mask_k,
    H, G, S, T, window, op_id, threshold, rescale, factor, cap, batches, heads, mask_batches, mask_heads,
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
        qp, head, batch, k0, k1, below = coordinates(
            SEED, BATCHES, HEADS, QUERIES, b, h, qi, S, op_id, threshold, DROP
        )  # fmt: skip
        mask_at = b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
        at = bh.to(tl.int64) * S + qi
        lse = tl.load(LSE + at, mask=qi < S, other=float("inf")) * LOG2E
        delta = tl.load(DELTA + at, mask=qi < S, other=0.0)
        q = tile(Q, b, h, q0, qb, qh, qs, S, E, EP, BM, TMA)
        k = tile(K, b, kv, n0, kb, kh, ks, T, E, EP, BN, TMA)
        x, _slope = score_tile(
            tl.dot(q, tl.trans(k), input_precision=PRECISION), qi[:, None], qp[:, None], ki,
            MASK, mask_at, mask_q, mask_k, S, T, window, factor, cap, CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, True,
        )  # fmt: skip
        w = tl.math.exp2(x - lse[:, None])
        do = tile(DO, b, h, q0, db, dh, ds, S, F, FP, BM, TMA)
        v = tile(V, b, kv, n0, vb, vh, vs, T, F, FP, BN, TMA)
        dw = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if DROP:
            dw = tl.where(keep_tile(n0, qp.to(tl.uint32), head, batch, k0, k1, below, BM, BN), dw, 0.0)
        total += w * (dw - delta[:, None])
    at = DM + mask.to(tl.int64) * S * T + qi.to(tl.int64)[:, None] * T + ki
    tl.store(at, total * rescale, mask=(qi[:, None] < S) & (ki < T))


# -- host


def query_config(c: Call) -> dict[str, Any]:
    return dict(BM=32 if c.width > 512 else 64, BN=64, **_depth(c))


def key_config(c: Call) -> dict[str, Any]:
    return dict(BM=32 if c.width > 256 else 64, BN=64, **_depth(c))


def _depth(c: Call) -> dict[str, Any]:
    wide = c.width > 256
    return dict(STAGES=1 if wide else 2, num_warps=8 if wide else 4, GROUP=16)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, out: Tensor, lse: Tensor,
    o: Options, by_query: dict[str, Any] | None = None, by_key: dict[str, Any] | None = None,
    into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """by_query, by_key: overrides of the configurations, for tuning. into: memory for the results."""
    dq, dk, dv = into or (heads_inside(q), heads_inside(k), heads_inside(v))
    c = Call(q, k, v, mask, seed, o)
    if c.empty:
        return dq.zero_(), dk.zero_(), dv.zero_()
    grad, out = c.rows(grad), c.rows(out)
    delta = torch.empty_like(lse)
    tma = takes_descriptors(c.q, c.k, c.v, grad, out)
    config = {**query_config(c), "TMA": tma, "DROP": c.dropped, **(by_query or {})}
    bm, bn, tma = config["BM"], config["BN"], config["TMA"]
    config["GROUP"] = c.group(c.h, config["GROUP"])
    ep, fp = c.flags["EP"], c.flags["FP"]
    launch(
        _query_gradient, (triton.cdiv(c.s, bm) * c.b * c.h,), q,
        described(c.q, bm, ep, tma), described(c.k, bn, ep, tma), described(c.v, bn, fp, tma),
        described(grad, bm, fp, tma), dq, described(out, bm, fp, tma), lse, delta, c.mask, c.seed, *c.maps,
        *c.q.stride()[:3], *c.k.stride()[:3], *c.v.stride()[:3], *grad.stride()[:3], *dq.stride()[:3],
        *out.stride()[:3], *c.mask_strides, *c.sizes, *c.factors, c.share, o.scale, **c.flags, **config,
    )  # fmt: skip
    config = {**key_config(c), "TMA": tma, "DROP": c.dropped, **(by_key or {})}
    bm, bn, tma = config["BM"], config["BN"], config["TMA"]
    config["GROUP"] = c.group(c.n, config["GROUP"])
    launch(
        _key_gradient, (triton.cdiv(c.t, bn) * c.b * c.n,), q,
        described(c.q, bm, ep, tma), described(c.k, bn, ep, tma), described(c.v, bn, fp, tma),
        described(grad, bm, fp, tma), dk, dv, lse, delta, c.mask, c.seed, *c.maps,
        *c.q.stride()[:3], *c.k.stride()[:3], *c.v.stride()[:3], *grad.stride()[:3], *dk.stride()[:3],
        *dv.stride()[:3], *c.mask_strides, *c.sizes, *c.factors, o.scale, **c.flags, **config,
    )  # fmt: skip
    return dq, dk, dv


def mask_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, seed: Tensor | None, out: Tensor, lse: Tensor,
    o: Options,
) -> Tensor:  # fmt: skip
    """Of an additive mask: [b, t] or 4-D."""
    c = Call(q, k, v, mask, seed, o)
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
        _mask_gradient, (triton.cdiv(c.s, 64) * triton.cdiv(c.t, 64) * batches * heads,), q,
        described(c.q, 64, ep, tma), described(c.k, 64, ep, tma), described(c.v, 64, fp, tma),
        described(grad, 64, fp, tma), made, lse, delta, c.mask, c.seed, *c.maps,
        *c.q.stride()[:3], *c.k.stride()[:3], *c.v.stride()[:3], *grad.stride()[:3], *c.mask_strides,
        *c.sizes, *c.factors, c.b // batches, c.h // heads, batches, heads, **c.flags, **config,
    )  # fmt: skip
    return made.sum_to_size(whole.shape).view(mask.shape).to(mask.dtype)
