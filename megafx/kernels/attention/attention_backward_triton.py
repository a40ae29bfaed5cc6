"""megafx::attention backward on CUDA: gradients of q, k and v. attention.py has the formula.

    delta = sum_f(out * grad);  dw = keep / (1 - p) * (grad v^T);  ds = w (dw - delta);  dq = scale ds k;  dk = scale ds^T q
    dv = (w keep / (1 - p))^T grad;  dmask = ds before the slope of the soft-cap, summed over the dims it is broadcast along

The weights are computed again, from q, k and the saved log-sum-exp. `_query_gradient` goes by rows; on the way it makes
delta, draws the dropout again and leaves both for `_key_gradient` (the dropout as bits), which goes by keys and sums over
the query heads that share them, in order: no atomics. Its tiles are keys by queries, so that weights and their gradients
stay in registers as the left side of the products that give dv and dk. Both compute ds: to keep it in memory for a product that
gives dq saved 6% at best and took up to 2.1 times as long (benchmarks/RESULTS.md, "Attention's backward").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.attention.attention_bits_triton import keep_bytes, kept_tile, kept_words, leave, spread
from megafx.kernels.attention.attention_reference import WORKSPACE, Inputs, heads_inside, kept_at_once
from megafx.kernels.attention.attention_segments_triton import Segments, keys_of_segments, tokens_of_segments
from megafx.kernels.attention.attention_triton import (
    Prepared,
    coordinates,
    described,
    key_range,
    schedule,
    score_tile,
    takes_descriptors,
    tile,
)
from megafx.kernels.common.op import launch
from megafx.kernels.common.tiles_triton import LOG2E

# -- dq


@triton.jit
def _query_tiles(
    dq, q, do, lse, delta, K, V, MASK, mask_at, KEYS, keys_at, SEGMENTS, ids_at, b, kv, q0, qi, qp, lo, hi,
    skip, gap, kb, kh, ks, vb, vh, vs, mask_q, mask_k, S, T, window, factor, cap, KEPT, head, batch, k0, k1, below,
    E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    EDGE: tl.constexpr, DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        if SEGMENTS is not None:
            n0 = tl.where(n0 < skip, n0, n0 + gap)
        n0 = tl.multiple_of(n0, BN)
        k = tile(K, b, kv, n0, kb, kh, ks, T, E, EP, BN, TMA)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        v = tile(V, b, kv, n0, vb, vh, vs, T, F, FP, BN, TMA)
        dw = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ki = n0 + tl.arange(0, BN)[None, :]
        x, slope = score_tile(
            x, qi[:, None], qp[:, None], ki, MASK, mask_at, mask_q, mask_k, KEYS, keys_at, SEGMENTS, ids_at, S, T,
            window, factor, cap,
            CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, EDGE,
        )  # fmt: skip
        w = tl.math.exp2(x - lse[:, None]) if SOFTCAP or KIND > 0 else tl.math.exp2(x * factor - lse[:, None])
        if DROP:
            group = (n0 // 8 + tl.arange(0, BN // 8)).to(tl.uint32)[None, :]
            bits = keep_bytes(group, qp.to(tl.uint32)[:, None], head, batch, k0, k1, below)
            leave(KEPT, bits, q0, n0, S, BM)
            dw = tl.where(spread(bits, BM, BN), dw, 0.0)
        ds = w * (dw - delta[:, None])
        if KIND >= 3:
            ds = tl.where(slope < 0.0, 0.0, ds * slope)  # also where the weights are NaN
        elif SOFTCAP:
            ds = ds * slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["op_id", "threshold", "first_head"])
def _query_gradient(
    Q, K, V, DO,  # IN
    DQ,  # [b, H, S, E] OUT
    OUT,  # [b, H, S, F] IN
    LSE,  # [b, H, S] fp32 IN
    STATS,  # [2, b, H, S to multiples of 64] fp32 OUT: the statistic in base 2, delta
    KEPT,  # decisions, int32, OUT with DROP
    MASK, KEYS, SEGMENTS, TILES, SEED, BATCHES, HEADS, QUERIES, BOUNDS,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, db, dh, ds, gb, gh, gs, ob, oh, os, mask_b, mask_h, mask_q, mask_k,
    keys_b, ids_b, tiles_b, H, G, S, T, window, op_id, threshold, rescale, factor, cap, share, scale, first_head, stats_apart,
    E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(S, BM)
    block, bh = schedule(tl.program_id(0), blocks, GROUP)
    kept = KEPT + bh.to(tl.int64) * kept_words(S, T)
    bh += first_head
    q0 = (blocks - 1 - block) * BM
    b = bh // H
    h = bh % H
    kv = h // G
    qi = q0 + tl.arange(0, BM)
    qp, head, batch, k0, k1, below = coordinates(SEED, BATCHES, HEADS, QUERIES, b, h, qi, S, op_id, threshold, DROP)
    mask_at = b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
    keys_at = b.to(tl.int64) * keys_b
    ids_at = b.to(tl.int64) * ids_b
    q = tile(Q, b, h, q0, qb, qh, qs, S, E, EP, BM, TMA)
    do = tile(DO, b, h, q0, db, dh, ds, S, F, FP, BM, TMA)
    o = tile(OUT, b, h, q0, ob, oh, os, S, F, FP, BM, TMA)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1) * share
    lse = tl.load(LSE + bh.to(tl.int64) * S + qi, mask=qi < S, other=float("inf")) * LOG2E
    padded = tl.cdiv(S, 64) * 64
    at = STATS + bh.to(tl.int64) * padded + qi
    tl.store(at, lse, mask=qi < padded)
    tl.store(at + stats_apart, delta, mask=qi < padded)
    first, whole, last = key_range(q0, T, window, BOUNDS, BM, BN, CAUSAL, WINDOW)
    lo, rest, gap = first, tl.maximum(first, whole), 0
    if SEGMENTS is not None:
        rest, lo, whole, last = keys_of_segments(first, whole, last, TILES, b.to(tl.int64) * tiles_b, q0, S, BN)
        gap = whole - lo
    dq = tl.zeros([BM, EP], tl.float32)
    dq = _query_tiles(
        dq, q, do, lse, delta, K, V, MASK, mask_at, KEYS, keys_at, None, ids_at, b, kv, q0, qi, qp, lo, whole, lo, 0,
        kb, kh, ks, vb, vh, vs, mask_q, mask_k, S, T, window, factor, cap, kept, head, batch, k0, k1, below,
        E, EP, F, FP, BM, BN, CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, False, DROP, TMA, PRECISION, STAGES,
    )  # fmt: skip
    dq = _query_tiles(
        dq, q, do, lse, delta, K, V, MASK, mask_at, KEYS, keys_at, SEGMENTS, ids_at, b, kv, q0, qi, qp,
        rest, last - gap, lo, gap,
        kb, kh, ks, vb, vh, vs, mask_q, mask_k, S, T, window, factor, cap, kept, head, batch, k0, k1, below,
        E, EP, F, FP, BM, BN, CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, True, DROP, TMA, PRECISION, STAGES,
    )  # fmt: skip
    columns = tl.arange(0, EP)[None, :]
    at = DQ + b.to(tl.int64) * gb + h.to(tl.int64) * gh + qi.to(tl.int64)[:, None] * gs + columns
    tl.store(at, (dq * (rescale * scale)).to(DQ.dtype.element_ty), mask=(qi[:, None] < S) & (columns < E))


# -- dk, dv


@triton.jit
def _key_tiles(
    dk, dv, k, v, Q, DO, STATS, stats_apart, MASK, KEYS, SEGMENTS, QUERIES, mask_at, keys_at, ids_at, b, h, n0, lo, hi,
    skip, gap, qb, qh, qs, db, dh, ds, mask_q, mask_k, S, T, window, factor, cap, KEPT,
    E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    EDGE: tl.constexpr, DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Queries lo .. hi; with segments, those from `skip` on are `gap` further."""
    for q0 in tl.range(lo, hi, BM, num_stages=STAGES):
        if SEGMENTS is not None:
            q0 = tl.where(q0 < skip, q0, q0 + gap)
        q0 = tl.multiple_of(q0, BM)
        q = tile(Q, b, h, q0, qb, qh, qs, S, E, EP, BM, TMA)
        do = tile(DO, b, h, q0, db, dh, ds, S, F, FP, BM, TMA)
        qi = q0 + tl.arange(0, BM)
        ki = n0 + tl.arange(0, BN)
        qp = qi
        if QUERIES is not None:
            qp = tl.load(QUERIES + qi, mask=qi < S, other=0)
        lse = tl.load(STATS + q0 + tl.arange(0, BM))
        delta = tl.load(STATS + stats_apart + q0 + tl.arange(0, BM))
        x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        x, slope = score_tile(
            x, qi[None, :], qp[None, :], ki[:, None], MASK, mask_at, mask_q, mask_k, KEYS, keys_at, SEGMENTS, ids_at, S, T,
            window, factor, cap,
            CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, EDGE,
        )  # fmt: skip
        w = tl.math.exp2(x - lse[None, :]) if SOFTCAP or KIND > 0 else tl.math.exp2(x * factor - lse[None, :])
        dw = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        kept = w
        if DROP:
            kept = tl.where(kept_tile(KEPT, q0, n0, S, BM), w, 0.0)
        dv = tl.dot(kept.to(do.dtype), do, dv, input_precision=PRECISION)
        dx = kept * dw - w * delta[None, :]  # one select serves both products
        if KIND >= 3:
            dx = tl.where(slope < 0.0, 0.0, dx * slope)
        elif SOFTCAP:
            dx = dx * slope
        dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["first_head"])
def _key_gradient(
    Q, K, V, DO,  # IN
    DK,  # [b, H / G, T, E] OUT
    DV,  # [b, H / G, T, F] OUT
    STATS,  # of _query_gradient IN
    KEPT,  # decisions, as _query_gradient left them, int32 IN
    MASK, KEYS, SEGMENTS, TILES, QUERIES,
    BOUNDS,  # of attention_bounds.bounds_of_keys, int32 IN, with QUERIES
    qb, qh, qs, kb, kh, ks, vb, vh, vs, db, dh, ds, eb, eh, es, fb, fh, fs, mask_b, mask_h, mask_q, mask_k,
    keys_b, ids_b, tiles_b, H, G, S, T, window, rescale, factor, cap, scale, first_head, stats_apart,
    E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(T, BN)
    block, bkv = schedule(tl.program_id(0), blocks, GROUP)  # block 0 has the most rows
    bkv += first_head
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
    if BOUNDS is not None:
        lo = tl.load(BOUNDS + block * 3)
        whole = tl.load(BOUNDS + block * 3 + 1)
        hi = tl.load(BOUNDS + block * 3 + 2)
    else:
        if CAUSAL:
            lo = tl.minimum(n0 // BM * BM, S)
            whole = tl.minimum(tl.cdiv(n0 + BN - 1, BM) * BM, S)
        if WINDOW:
            lo = tl.maximum(lo, (tl.maximum(0, n0 - window + 1)) // BM * BM)
            hi = tl.minimum(S, n0 + BN - 1 + window)
            whole = hi
    edges, seen, end, gap = tl.minimum(whole, hi), tl.maximum(lo, whole), hi, 0  # rows [seen, end) are not compared
    if SEGMENTS is not None:
        edges = hi
        seen = hi
    if TILES is not None:
        near, last, same, beyond = tokens_of_segments(TILES, b.to(tl.int64) * tiles_b, n0, T)
        if BOUNDS is not None:  # tokens of the whole sequence -> queries here
            here = BOUNDS + blocks * 3
            lo = tl.maximum(lo, tl.load(here + near // 64) // BM * BM)
            hi = tl.minimum(hi, tl.load(here + tl.cdiv(T, 64) + 1 + tl.cdiv(last, 64)))
            edges = hi
            seen = hi
            end = hi
        else:
            lo = tl.maximum(lo, near // BM * BM)
            hi = tl.minimum(hi, last)
            seen = tl.maximum(tl.maximum(lo, whole), tl.cdiv(same, BM) * BM)
            end = tl.maximum(seen, tl.minimum(hi, beyond) // BM * BM)
            gap = end - seen
            edges = hi - gap
    for g in range(G):
        h = kv * G + g
        bh = b * H + h
        stats = STATS + bh.to(tl.int64) * (tl.cdiv(S, 64) * 64)
        kept = KEPT + (bh - first_head * G).to(tl.int64) * kept_words(S, T)
        mask_at = b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
        keys_at = b.to(tl.int64) * keys_b
        ids_at = b.to(tl.int64) * ids_b
        dk, dv = _key_tiles(
            dk, dv, k, v, Q, DO, stats, stats_apart, MASK, KEYS, SEGMENTS, QUERIES, mask_at, keys_at, ids_at, b, h, n0,
            lo, edges, seen, gap,
            qb, qh, qs, db, dh, ds, mask_q, mask_k, S, T, window, factor, cap, kept,
            E, EP, F, FP, BM, BN, CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, True, DROP, TMA, PRECISION, STAGES,
        )  # fmt: skip
        dk, dv = _key_tiles(
            dk, dv, k, v, Q, DO, stats, stats_apart, MASK, KEYS, None, QUERIES, mask_at, keys_at, ids_at, b, h, n0,
            seen, end, seen, 0, qb, qh, qs, db, dh, ds, mask_q, mask_k, S, T, window, factor, cap, kept,
            E, EP, F, FP, BM, BN, CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, False, DROP, TMA, PRECISION, STAGES,
        )  # fmt: skip
    ki = n0 + tl.arange(0, BN)
    columns = tl.arange(0, EP)[None, :]
    at = DK + b.to(tl.int64) * eb + kv.to(tl.int64) * eh + ki.to(tl.int64)[:, None] * es + columns
    tl.store(at, (dk * (rescale * scale)).to(DK.dtype.element_ty), mask=(ki[:, None] < T) & (columns < E))
    columns = tl.arange(0, FP)[None, :]
    at = DV + b.to(tl.int64) * fb + kv.to(tl.int64) * fh + ki.to(tl.int64)[:, None] * fs + columns
    tl.store(at, (dv * rescale).to(DV.dtype.element_ty), mask=(ki[:, None] < T) & (columns < F))


# -- host


def query_config(c: Prepared) -> dict[str, Any]:
    wide = c.width > 256
    warps = 8 if wide else 4
    return dict(BM=32 if c.width > 512 else 64, BN=64, STAGES=1 if wide else 2, num_warps=warps, GROUP=16)


def key_config(c: Prepared) -> dict[str, Any]:
    """Short tiles leave registers for three stages (measured: H200). In fp32 with dropout and a boolean mask of pairs, Triton
    3.6 compiles no others: its TritonGPURemoveLayoutConversions fails."""
    wide = c.width > 256
    short = c.width > 128 or not c.dropped or c.q.dtype == torch.float32
    warps = 8 if wide else 4
    return dict(BM=32 if short else 64, BN=64, STAGES=1 if wide else 3, num_warps=warps, GROUP=8 if short else 16)


def backward(
    grad: Tensor, x: Inputs, out: Tensor, lse: Tensor, *, into: Sequence[Tensor] | None = None,
    workspace: int = WORKSPACE, by_query: dict[str, Any] | None = None, by_key: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """into: memory for the results. by_query, by_key: overrides of the configurations."""
    dq, dk, dv = into or (heads_inside(x.q), heads_inside(x.k), heads_inside(x.v))
    c = Prepared(x)
    if c.empty:
        return dq.zero_(), dk.zero_(), dv.zero_()
    grad, out = c.rows(grad), c.rows(out)
    tma = takes_descriptors(c.q, c.k, c.v, grad, out)
    first = {**query_config(c), "TMA": tma, "DROP": c.dropped, **(by_query or {})}
    then = {**key_config(c), "TMA": tma, "DROP": c.dropped, **(by_key or {})}
    ep, fp, groups = c.flags["EP"], c.flags["FP"], c.h // c.n
    padded = c.b * c.h * triton.cdiv(c.s, 64) * 64
    stats = torch.empty(2 * padded, dtype=torch.float32, device=c.q.device)
    step, weights = c.b * c.n, 0
    if c.dropped:
        step, weights = kept_at_once(c.q.shape, c.k.shape, workspace)
    kept = torch.empty(weights // 32, dtype=torch.int32, device=c.q.device)
    of_keys = c.segments if c.where is None else Segments.of(x.segments, None, c.t, c.t)
    for head in range(0, c.b * c.n, step):  # of k and v
        heads = min(step, c.b * c.n - head)
        bm, bn, tma = first["BM"], first["BN"], first["TMA"]
        launch(
            _query_gradient, (triton.cdiv(c.s, bm) * heads * groups,), c.q,
            described(c.q, bm, ep, tma), described(c.k, bn, ep, tma), described(c.v, bn, fp, tma),
            described(grad, bm, fp, tma), dq, described(out, bm, fp, tma), lse, stats, kept, c.mask, c.keys,
            c.segments.ids, c.segments.tiles, c.seed, *c.maps, c.bounds_of_queries(bm, bn),
            *c.q.stride()[:3], *c.k.stride()[:3], *c.v.stride()[:3], *grad.stride()[:3], *dq.stride()[:3],
            *out.stride()[:3], *c.mask_strides, c.keys_stride, *c.segments.strides, *c.sizes, *c.factors, c.share,
            x.scale, head * groups, padded, **c.flags, **first | {"GROUP": math.gcd(first["GROUP"], heads * groups)},
        )  # fmt: skip
        bm, bn, tma = then["BM"], then["BN"], then["TMA"]
        launch(
            _key_gradient, (triton.cdiv(c.t, bn) * heads,), c.q,
            described(c.q, bm, ep, tma), described(c.k, bn, ep, tma), described(c.v, bn, fp, tma),
            described(grad, bm, fp, tma), dk, dv, stats, kept, c.mask, c.keys,
            c.segments.ids, of_keys.tiles, c.maps[2], c.bounds_of_keys(bn),
            *c.q.stride()[:3], *c.k.stride()[:3], *c.v.stride()[:3], *grad.stride()[:3], *dk.stride()[:3],
            *dv.stride()[:3], *c.mask_strides, c.keys_stride, *of_keys.strides, *c.sizes[:5], c.rescale, *c.factors,
            x.scale, head, padded, **c.flags, **then | {"GROUP": math.gcd(then["GROUP"], heads)},
        )  # fmt: skip
    return dq, dk, dv
