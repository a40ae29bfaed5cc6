"""megafx::attention forward on CUDA; attention.py has the formula, attention_reference.py the mask's bits.

One program makes BM rows of one head: an online softmax in base 2 over tiles of BN keys, those that causality and the
window let it see; tiles where every pair is visible and inside skip the comparisons. Dropout: attention_bits_triton.py.

Tiles come through 4-D tensor descriptors (TMA: any strides that are multiples of 16 bytes, bounds for free), else through
pointers. An additive mask below -6e4 (a finfo.min) absorbs the score: it counts as -8192, so that a row that is masked so
throughout stays uniform, as in eager (its statistic, and so its weights in backward, good to 5e-4); -inf hides. In bf16 a sum
with -8192 and below absorbs scores already. Scores that are filled (KIND 3 to 5) have a slope of -1: no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.attention.attention_bits_triton import keep_tile, subkey
from megafx.kernels.attention.attention_bounds import bounds_of_keys, bounds_of_queries
from megafx.kernels.attention.attention_reference import (
    FILLED,
    FILLED_NAN,
    ZEROS,
    Inputs,
    empty_results,
    positions,
    where_is,
)
from megafx.kernels.attention.attention_segments_triton import Segments, keys_of_segments
from megafx.kernels.common import philox
from megafx.kernels.common.draw import draws, factor_of
from megafx.kernels.common.op import as_bytes, launch
from megafx.kernels.common.tiles_triton import LOG2E, power_of_2

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
ABSORBED: tl.constexpr = tl.constexpr(-8192.0)
ABSORBS: tl.constexpr = tl.constexpr(-6.0e4)


# -- tiles and scores


@triton.jit
def schedule(pid, blocks, GROUP: tl.constexpr):
    """-> (block, head): heads in groups that share the cache, the block slow inside of a group."""
    inside = pid % (GROUP * blocks)
    return inside // GROUP, pid // (GROUP * blocks) * GROUP + inside % GROUP


@triton.jit
def tile(
    X, b, h, row, stride_b, stride_h, stride_s, length,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows row .. row + B of head h: [B, DP], zeros beyond `length` and D."""
    if TMA:
        return tl.reshape(X.load([b, h, row, 0]), [B, DP])
    else:
        rows = row + tl.arange(0, B)
        columns = tl.arange(0, DP)
        at = X + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        at = at + rows.to(tl.int64)[:, None] * stride_s + columns[None, :]
        inside = rows[:, None] < length
        if D != DP:
            inside = inside & (columns[None, :] < D)
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _masked(x, given, BOOL: tl.constexpr, KIND: tl.constexpr):
    """-> (scores with the mask, whether they are still seen)."""
    if BOOL:
        seen = given != 0
        return tl.where(seen, x, ABSORBED if KIND == 3 else float("-inf")), seen
    else:
        bias = given.to(tl.float32)
        hidden = tl.where(bias == float("-inf"), float("-inf"), ABSORBED)
        seen = bias > (ABSORBED if given.dtype == tl.bfloat16 else ABSORBS)
        return tl.where(seen, x + bias * LOG2E, hidden), seen


@triton.jit
def score_tile(
    x, qi, qp, ki, MASK, mask_at, mask_q, mask_k, KEYS, keys_at, SEGMENTS, ids_at, S, T, window, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """x = q k^T -> (scores in base 2, slope of the soft-cap, or -1 where filled).

    qi, qp: query (here, in the whole sequence), ki: key.

    Without soft-cap and mask (KIND 0) the scores are still to be multiplied by `factor`.
    KIND: 1 a bool mask, 2 an additive one; 3 to 5: a fill in place of the score: of a bool mask a finite one or -inf, of an
    additive one its own. ROWS: it depends on the query. KEYS: one more mask, of keys, bool (uint8) or additive.
    SEGMENTS: ids of documents by index in the whole sequence.
    EDGE: pairs may be out of sight or of bounds.
    """
    slope = x
    if SOFTCAP:
        bent = 1.0 - 2.0 / (tl.math.exp2(x * factor) + 1.0)  # tanh
        slope = 1.0 - bent * bent
        x = bent * cap
    elif KIND > 0:
        x = x * factor
    if KIND > 0:
        if ROWS:
            at = MASK + mask_at + qi.to(tl.int64) * mask_q + ki.to(tl.int64) * mask_k
            given = tl.load(at, mask=(qi < S) & (ki < T), other=0)
        else:
            given = tl.load(MASK + mask_at + ki.to(tl.int64) * mask_k, mask=ki < T, other=0)
        x, near = _masked(x, given, KIND != 2 and KIND != 5, KIND)
        if KIND >= 3:
            slope = tl.where(near, slope if SOFTCAP else 1.0, -1.0)
    if KEYS is not None:
        given = tl.load(KEYS + keys_at + ki, mask=ki < T, other=0)
        masked, near = _masked(x, given, KEYS.dtype.element_ty == tl.uint8, KIND)
        x = tl.where(x == float("-inf"), x, masked)
        if KIND >= 3:
            slope = tl.where(near, slope, -1.0)
    if SEGMENTS is not None:
        mine = tl.load(SEGMENTS + ids_at + qp, mask=qi < S, other=0)
        x = tl.where(mine == tl.load(SEGMENTS + ids_at + ki, mask=ki < T, other=0), x, float("-inf"))
    if EDGE:
        seen = ki < T
        if CAUSAL:
            seen = seen & (ki <= qp)
        if WINDOW:
            seen = seen & (qp - ki < window) & (ki - qp < window)
        x = tl.where(seen, x, float("-inf"))
    return x, slope


@triton.jit
def key_range(q0, T, window, BOUNDS, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """-> (first, whole, last): keys [first, whole) are all visible and inside, [whole, last) are to be compared.
    BOUNDS: what attention_bounds.key_bounds says of some of the queries; None: they are all of the sequence."""
    last = T
    first = 0
    whole = (T // BN) * BN
    if BOUNDS is not None:
        first = tl.load(BOUNDS + q0 // BM * 3)
        whole = tl.load(BOUNDS + q0 // BM * 3 + 1)
        last = tl.load(BOUNDS + q0 // BM * 3 + 2)
    else:
        if CAUSAL:
            last = tl.minimum(T, q0 + BM)
            whole = tl.minimum(whole, ((q0 + 1) // BN) * BN)
        if WINDOW:
            first = tl.maximum(0, q0 - window + 1) // BN * BN
            last = tl.minimum(last, q0 + BM - 1 + window)
            whole = first
    return first, whole, last


# -- forward


@triton.jit
def _forward_tiles(
    acc, total, high, q, K, V, MASK, mask_at, KEYS, keys_at, SEGMENTS, ids_at, b, kv, qi, qp, lo, hi, skip, gap,
    kb, kh, ks, vb, vh, vs, mask_q, mask_k, S, T, window, factor, cap, head, batch, k0, k1, below,
    E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    EDGE: tl.constexpr, DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys lo .. hi; with segments, those from `skip` on are `gap` further."""
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        if SEGMENTS is not None:
            n0 = tl.where(n0 < skip, n0, n0 + gap)
        n0 = tl.multiple_of(n0, BN)
        k = tile(K, b, kv, n0, kb, kh, ks, T, E, EP, BN, TMA)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        ki = n0 + tl.arange(0, BN)[None, :]
        x, _ = score_tile(
            x, qi[:, None], qp[:, None], ki, MASK, mask_at, mask_q, mask_k, KEYS, keys_at, SEGMENTS, ids_at, S, T,
            window, factor, cap,
            CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, EDGE,
        )  # fmt: skip
        new = tl.maximum(high, tl.max(x, 1)) if SOFTCAP or KIND > 0 else tl.maximum(high, tl.max(x, 1) * factor)
        base = new
        if WINDOW or KIND > 0 or SEGMENTS is not None:  # a row may have seen nothing yet
            base = tl.where(new == float("-inf"), 0.0, new)
        w = tl.math.exp2(x - base[:, None]) if SOFTCAP or KIND > 0 else tl.math.exp2(x * factor - base[:, None])
        shrink = tl.math.exp2(high - base)
        total = total * shrink + tl.sum(w, 1)
        if DROP:
            w = tl.where(keep_tile(n0, qp.to(tl.uint32), head, batch, k0, k1, below, BM, BN), w, 0.0)
        acc = acc * shrink[:, None]
        v = tile(V, b, kv, n0, vb, vh, vs, T, F, FP, BN, TMA)
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision=PRECISION)
        high = new
    return acc, total, high


@triton.jit(do_not_specialize=["op_id", "threshold"])
def _forward(
    Q,  # [b, H, S, E] pointer or descriptor IN
    K,  # [b, H / G, T, E] IN
    V,  # [b, H / G, T, F] IN
    OUT,  # [b, H, S, F] OUT
    LSE,  # [b, H, S] fp32 OUT, natural logarithm
    MASK,  # [b, H, S, T] by strides, bool as uint8 or additive, IN
    KEYS,  # [b, T] by a stride, bool as uint8 or additive, IN, or None
    SEGMENTS,  # [b, T] by a stride, integers IN, or None
    TILES,  # of `Segments`, by a stride, IN, or None
    SINK,  # [H] IN, or None
    SEED,  # [] int64 IN
    BATCHES, HEADS, QUERIES,  # [b], [H], [S] int32 IN: indices in the whole, or None
    BOUNDS,  # [S / BM, 3] int32 IN, with QUERIES
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, mask_b, mask_h, mask_q, mask_k, keys_b, ids_b, tiles_b,
    H, G, S, T, window, op_id, threshold, rescale, factor, cap,
    E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(S, BM)
    block, bh = schedule(tl.program_id(0), blocks, GROUP)
    q0 = (blocks - 1 - block) * BM  # the longest rows first
    b = bh // H
    h = bh % H
    kv = h // G
    qi = q0 + tl.arange(0, BM)
    qp, head, batch, k0, k1, below = coordinates(SEED, BATCHES, HEADS, QUERIES, b, h, qi, S, op_id, threshold, DROP)
    mask_at = b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h
    keys_at = b.to(tl.int64) * keys_b
    ids_at = b.to(tl.int64) * ids_b
    q = tile(Q, b, h, q0, qb, qh, qs, S, E, EP, BM, TMA)
    acc = tl.zeros([BM, FP], tl.float32)
    total = tl.zeros([BM], tl.float32)
    high = tl.full([BM], float("-inf"), tl.float32)
    if SINK is not None:  # a key that is seen first, and has no value
        high = tl.zeros([BM], tl.float32) + tl.load(SINK + h).to(tl.float32) * LOG2E
        total += tl.where(high > float("-inf"), 1.0, 0.0)
    first, whole, last = key_range(q0, T, window, BOUNDS, BM, BN, CAUSAL, WINDOW)
    lo, rest, gap = first, tl.maximum(first, whole), 0
    if SEGMENTS is not None:
        rest, lo, whole, last = keys_of_segments(first, whole, last, TILES, b.to(tl.int64) * tiles_b, q0, S, BN)
        gap = whole - lo
    acc, total, high = _forward_tiles(
        acc, total, high, q, K, V, MASK, mask_at, KEYS, keys_at, None, ids_at, b, kv, qi, qp, lo, whole, lo, 0,
        kb, kh, ks, vb, vh, vs, mask_q, mask_k, S, T, window, factor, cap, head, batch, k0, k1, below,
        E, EP, F, FP, BM, BN, CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, False, DROP, TMA, PRECISION, STAGES,
    )  # fmt: skip
    acc, total, high = _forward_tiles(
        acc, total, high, q, K, V, MASK, mask_at, KEYS, keys_at, SEGMENTS, ids_at, b, kv, qi, qp, rest, last - gap, lo, gap,
        kb, kh, ks, vb, vh, vs, mask_q, mask_k, S, T, window, factor, cap, head, batch, k0, k1, below,
        E, EP, F, FP, BM, BN, CAUSAL, WINDOW, SOFTCAP, KIND, ROWS, True, DROP, TMA, PRECISION,
        STAGES if SEGMENTS is None or STAGES < 3 else 2,  # a third would leave room for one program a core
    )  # fmt: skip
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    acc = acc * (rescale / safe)[:, None]
    nothing = float("inf")
    if not ZEROS:  # rows of -inf: softmax gives NaN, and so do the weights in backward
        nothing = float("nan")
        acc = tl.where(seen[:, None], acc, nothing)
    lse = tl.where(seen, (high + tl.math.log2(safe)) * LN2, nothing)
    tl.store(LSE + bh.to(tl.int64) * S + qi, lse, mask=qi < S)
    columns = tl.arange(0, FP)[None, :]
    at = OUT + b.to(tl.int64) * ob + h.to(tl.int64) * oh + qi.to(tl.int64)[:, None] * os + columns
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=(qi[:, None] < S) & (columns < F))


@triton.jit
def coordinates(SEED, BATCHES, HEADS, QUERIES, b, h, qi, S, op_id, threshold, DROP: tl.constexpr):
    """Where this rank's elements are in the whole, and the op's key: queries, head, batch, key, threshold << 16."""
    qp = qi
    if QUERIES is not None:
        qp = tl.load(QUERIES + qi, mask=qi < S, other=0)
    head = h.to(tl.uint32)
    batch = b.to(tl.uint32)
    k0 = head
    k1 = head
    below = head
    if DROP:
        if HEADS is not None:
            head = tl.load(HEADS + h).to(tl.uint32)
        if BATCHES is not None:
            batch = tl.load(BATCHES + b).to(tl.uint32)
        k0, k1 = subkey(SEED, op_id)
        below = tl.cast(threshold, tl.uint32) << 16
    return qp, head, batch, k0, k1, below


# -- host


class Prepared:
    """What the launchers of one call share: geometry, flags and arguments by name."""

    def __init__(self, x: Inputs) -> None:
        q, k, v, mask, key_mask, segments, sink = x[:7]
        self.q, self.k, self.v = (self.rows(y) for y in (q, k, v))
        self.b, self.h, self.s, self.e = q.shape
        self.n, self.t, self.f = k.shape[1], k.shape[2], v.shape[3]
        below = philox.threshold(x.draw.p)
        self.dropped = draws(x.draw.p)
        self.rescale = factor_of(x.draw.p)
        self.share = 1 - below / philox.DRAWS
        softcap = x.softcap > 0
        whole = mask
        if mask is not None:
            whole = mask[:, None, None] if mask.dim() == 2 else mask
            whole = as_bytes(whole) if whole.dtype == torch.bool else whole
            whole = whole.expand(self.b, self.h, self.s, self.t)
        self.mask = whole
        strides = whole.stride() if whole is not None else (0, 0, 0, 0)
        self.mask_strides = strides
        self.keys = None if key_mask is None else self._of_keys(key_mask)
        self.keys_stride = 0 if self.keys is None else self.keys.stride(0)
        self.sink = None if sink is None else sink.contiguous()
        kind = 0 if mask is None else _kind(mask, x.hidden)
        factor = 2 * x.scale / x.softcap if softcap else x.scale
        device = q.device
        self.seed = x.draw.seed.to(device) if self.dropped else None
        self.maps = [positions(size, dim, x.draw, device) for dim, size in enumerate(q.shape[:3])]
        self.segments = Segments.of(segments, self.maps[2], self.s, self.t)
        self.where = where_is(self.s, 2, x.draw)
        # without soft-cap and mask the maximum of the scaled scores is taken before scaling
        assert x.scale > 0 or softcap or kind, "a scale that is not positive needs a mask"
        self.sizes = (self.h, self.h // self.n, self.s, self.t, x.window, x.draw.op_id, below, self.rescale)
        self.factors = (factor * LOG2E.value, x.softcap * LOG2E.value)
        self.flags: dict[str, Any] = dict(
            E=self.e, EP=_power(self.e), F=self.f, FP=_power(self.f),
            CAUSAL=x.causal, WINDOW=x.window > 0, SOFTCAP=softcap, KIND=kind, ROWS=strides[2] != 0,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        )  # fmt: skip

    def _of_keys(self, mask: Tensor) -> Tensor:
        mask = mask.expand(mask.shape[0], self.t)
        mask = mask if mask.stride(1) == 1 or self.t == 1 else mask.contiguous()
        mask = as_bytes(mask) if mask.dtype == torch.bool else mask
        return mask.expand(self.b, self.t)

    def bounds_of_queries(self, rows: int, columns: int) -> Tensor | None:
        given = (self.t, self.flags["CAUSAL"], self.sizes[4], rows, columns, str(self.q.device))
        return None if self.where is None else bounds_of_queries(self.where, *given)

    def bounds_of_keys(self, columns: int) -> Tensor | None:
        given = (self.t, self.flags["CAUSAL"], self.sizes[4], columns, str(self.q.device))
        return None if self.where is None else bounds_of_keys(self.where, *given)

    @staticmethod
    def rows(x: Tensor) -> Tensor:
        """With consecutive elements along the last dim."""
        return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()

    @property
    def width(self) -> int:
        """Bytes of the wider row."""
        return int(max(self.flags["EP"], self.flags["FP"])) * self.q.element_size()

    @property
    def empty(self) -> bool:
        return 0 in (self.b, self.h, self.s, self.t)


def _kind(mask: Tensor, hidden: int) -> int:
    filled = hidden in (FILLED, FILLED_NAN)
    if mask.dtype != torch.bool:
        return 5 if filled else 2
    return 1 if not filled else 3 if hidden == FILLED else 4


def _power(n: int) -> int:
    return max(16, power_of_2(n))


def takes_descriptors(*tensors: Tensor) -> bool:
    """TMA: 16-byte aligned starts and strides, Hopper or later."""
    if tensors[0].device.type == "cuda" and torch.cuda.get_device_capability(tensors[0].device)[0] < 9:
        return False
    return all(
        x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 and s > 0 for s in x.stride()[:-1])
        for x in tensors
    )


def described(x: Tensor, rows: int, columns: int, tma: bool) -> Any:
    """The kernel argument of a [b, h, s, d] tensor that is read in tiles."""
    if not tma:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])


def forward_config(c: Prepared) -> dict[str, Any]:
    """64 x 64 on 4 warps is fastest up to 128 wide: several programs share a core (measured: H200)."""
    stages = 2 if c.width <= 128 else 3 if c.width <= 256 else 1
    return dict(BM=32 if c.width > 512 else 64, BN=64, STAGES=stages, num_warps=4 if c.width <= 256 else 8, GROUP=16)


def forward(x: Inputs, **config: Any) -> tuple[Tensor, Tensor]:
    """config: overrides of `forward_config`, for tuning; TMA=bool."""
    out, lse = empty_results(x.q, x.v)
    c = Prepared(x)
    if c.empty:
        return out.zero_(), lse.fill_(math.inf) if c.sink is None else lse.copy_(c.sink[:, None].expand_as(lse))
    config = {**forward_config(c), "TMA": takes_descriptors(c.q, c.k, c.v), **config}
    bm, bn, tma = config["BM"], config["BN"], config["TMA"]
    config["GROUP"] = math.gcd(config["GROUP"], c.b * c.h)
    launch(
        _forward, (triton.cdiv(c.s, bm) * c.b * c.h,), c.q,
        described(c.q, bm, c.flags["EP"], tma), described(c.k, bn, c.flags["EP"], tma),
        described(c.v, bn, c.flags["FP"], tma), out, lse, c.mask, c.keys, c.segments.ids, c.segments.tiles, c.sink, c.seed,
        *c.maps, c.bounds_of_queries(bm, bn),
        *c.q.stride()[:3], *c.k.stride()[:3], *c.v.stride()[:3], *out.stride()[:3], *c.mask_strides,
        c.keys_stride, *c.segments.strides, *c.sizes, *c.factors, DROP=c.dropped, ZEROS=x.hidden == ZEROS,
        **c.flags, **config,
    )  # fmt: skip
    return out, lse
