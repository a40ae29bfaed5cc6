"""megafx::rope and rope_qk on CUDA; rope.py has formulas and ops.

A program rotates all heads of one position, q's and k's: both are read before either is written (where heads are too many
for that, q and k have programs of their own). The tables are read once into registers for all heads. Where heads lie side by
side in memory ([b, s, n, d], also seen as [b, n, s, d]), a program reads one run of n * d elements. Any strides in the leading
dims; the last dim must be dense (else x is copied). Pairs are split and joined in registers. More than three leading dims, and
tables that broadcast over none of them, take the plain path.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.attention.rope import Tables, check_rope, rope_reference
from megafx.kernels.common.op import launch
from megafx.kernels.common.tiles_triton import power_of_2

TILE = 2048  # pairs a step of a program


@triton.jit
def _columns(table, at, half, INTERLEAVED: tl.constexpr, PER_PAIR: tl.constexpr, HALF: tl.constexpr):
    """Table values of the first and of the second elements of the pairs: fp32 [1, HALF] each."""
    i = tl.arange(0, HALF)
    if PER_PAIR:
        a = tl.load(table + at + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
        return a, a
    elif INTERLEAVED:
        j = tl.arange(0, 2 * HALF)
        both = tl.load(table + at + j, mask=j < 2 * half, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, [1, HALF, 2]))
        return a, b
    else:
        a = tl.load(table + at + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
        b = tl.load(table + at + half + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
        return a, b


@triton.jit
def _pairs(x_row, inside_row, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """First and second elements of the pairs of some heads, fp32 [HEADS, HALF]."""
    if INTERLEAVED:
        j = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(x_row + j, mask=inside_row & (j < 2 * half), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, [x_row.shape[0], HALF, 2]))
    else:
        i = tl.arange(0, HALF)[None, :]
        a = tl.load(x_row + i, mask=inside_row & (i < half), other=0.0).to(tl.float32)
        b = tl.load(x_row + half + i, mask=inside_row & (i < half), other=0.0).to(tl.float32)
        return a, b


@triton.jit
def _turn(
    a, b, x_row, out_row, inside_row, cos_a, cos_b, sin_a, sin_b, half, width,
    INTERLEAVED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Writes the pairs rotated, and what is behind them as it is."""
    first = (a * cos_a - b * sin_a).to(out_row.dtype.element_ty)
    second = (b * cos_b + a * sin_b).to(out_row.dtype.element_ty)
    if INTERLEAVED:
        j = tl.arange(0, 2 * HALF)[None, :]
        turned = tl.reshape(tl.join(first, second), [x_row.shape[0], 2 * HALF])
        tl.store(out_row + j, turned, mask=inside_row & (j < 2 * half))
    else:
        i = tl.arange(0, HALF)[None, :]
        tl.store(out_row + i, first, mask=inside_row & (i < half))
        tl.store(out_row + half + i, second, mask=inside_row & (i < half))
    if REST:
        c = 2 * half + tl.arange(0, REST)[None, :]
        kept = inside_row & (c < width)
        tl.store(out_row + c, tl.load(x_row + c, mask=kept), mask=kept)


@triton.jit
def _rotate(
    x, out, heads, x_head, out_head, cos_a, cos_b, sin_a, sin_b, half, width,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """All heads of one position."""
    for h in range(0, heads, HEADS):
        row = h + tl.arange(0, HEADS)[:, None]
        x_row = x + row * x_head
        out_row = out + row * out_head
        a, b = _pairs(x_row, row < heads, half, INTERLEAVED, HALF)
        _turn(a, b, x_row, out_row, row < heads, cos_a, cos_b, sin_a, sin_b, half, width, INTERLEAVED, HALF, REST)


@triton.jit
def _rope(
    q,  # [P0, P1, heads, width] IN by strides, last dim dense
    q_out,  # like q, OUT
    k,  # with TWO: as q, with its own heads, IN
    k_out,  # like k, OUT
    cos,  # [P0, P1, half or 2 * half] IN by strides, 0 where it broadcasts
    sin,  # as cos IN
    P1, half, width,
    q_heads, q0, q1, q2, qo0, qo1, qo2,  # strides of q and q_out by P0, P1, head; so those of k
    k_heads, k0, k1, k2, ko0, ko1, ko2,
    cos0, cos1, sin0, sin1,
    TWO: tl.constexpr, TOGETHER: tl.constexpr, BACK: tl.constexpr, INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    p0 = (tl.program_id(0) // P1).to(tl.int64)
    p1 = (tl.program_id(0) % P1).to(tl.int64)
    cos_a, cos_b = _columns(cos, p0 * cos0 + p1 * cos1, half, INTERLEAVED, PER_PAIR, HALF)
    sin_a, sin_b = _columns(sin, p0 * sin0 + p1 * sin1, half, INTERLEAVED, PER_PAIR, HALF)
    if BACK:
        swap = -sin_a
        sin_a = -sin_b
        sin_b = swap
    q_at = q + p0 * q0 + p1 * q1
    o_at = q_out + p0 * qo0 + p1 * qo1
    k_at = k + p0 * k0 + p1 * k1
    ko_at = k_out + p0 * ko0 + p1 * ko1
    if TOGETHER:
        row = tl.arange(0, Q_HEADS)[:, None]
        k_row = tl.arange(0, K_HEADS)[:, None]
        a, b = _pairs(q_at + row * q2, row < q_heads, half, INTERLEAVED, HALF)
        c, d = _pairs(k_at + k_row * k2, k_row < k_heads, half, INTERLEAVED, HALF)
        _turn(
            a, b, q_at + row * q2, o_at + row * qo2, row < q_heads, cos_a, cos_b, sin_a, sin_b, half, width,
            INTERLEAVED, HALF, REST,
        )  # fmt: skip
        _turn(
            c, d, k_at + k_row * k2, ko_at + k_row * ko2, k_row < k_heads, cos_a, cos_b, sin_a, sin_b, half, width,
            INTERLEAVED, HALF, REST,
        )  # fmt: skip
    elif TWO and tl.program_id(1) == 1:
        _rotate(
            k_at, ko_at, k_heads, k2, ko2, cos_a, cos_b, sin_a, sin_b, half, width, INTERLEAVED, K_HEADS, HALF, REST
        )
    else:
        _rotate(q_at, o_at, q_heads, q2, qo2, cos_a, cos_b, sin_a, sin_b, half, width, INTERLEAVED, Q_HEADS, HALF, REST)


def _ones(x: Tensor, dims: int) -> Tensor:
    """x with leading dims of 1 up to `dims`."""
    for _ in range(dims - x.dim()):
        x = x.unsqueeze(0)
    return x


def _head_dim(xs: list[Tensor], cos: Tensor) -> int:
    """The dim of heads: that in which q and k differ; else, of those in which the tables broadcast, the densest in x."""
    differ = [d for d in range(3) if xs[0].shape[d] != xs[-1].shape[d]]
    free = [d for d in range(3) if cos.shape[d] == 1]
    many = differ or [d for d in free if xs[0].shape[d] != 1] or free
    return min(many, key=lambda d: (xs[0].stride(d), -d))


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _run(xs: list[Tensor], tables: Tables, back: bool = False) -> list[Tensor]:
    for x in xs:
        check_rope(x, tables)
    dims = max(4, xs[0].dim())
    cos, sin = (_ones(_dense(c), dims) for c in tables[:2])
    if dims > 4 or all(cos.shape[d] != 1 for d in range(3)):  # no dim of heads: nothing to share between them
        return [rope_reference(x, cos, sin, *tables[2:], back=back) for x in xs]
    outs = [torch.empty_like(x) for x in xs]
    shown, made = [_ones(_dense(x), 4) for x in xs], [_ones(out, 4) for out in outs]
    heads = _head_dim(shown, cos)
    a, b = (d for d in range(3) if d != heads)
    q, k = shown[0], shown[-1]
    half = tables.rotated // 2
    width, rest = q.shape[-1], q.shape[-1] - 2 * half
    positions = q.shape[a] * q.shape[b]
    if positions == 0 or q.shape[heads] == 0:
        return outs
    block = power_of_2(max(1, half))
    tiles = [min(power_of_2(x.shape[heads]), max(1, TILE // block)) for x in (q, k)]
    together = len(xs) == 2 and all(n >= x.shape[heads] for n, x in zip(tiles, (q, k), strict=True))

    def strides(x: Tensor) -> tuple[int, int, int]:
        return x.stride(a), x.stride(b), x.stride(heads)

    def table(t: Tensor, d: int) -> int:
        return 0 if t.shape[d] == 1 else t.stride(d)

    launch(
        _rope, (positions, 1 if together else len(xs)), q,
        q, made[0], k, made[-1], cos, sin, q.shape[b], half, width,
        q.shape[heads], *strides(q), *strides(made[0]), k.shape[heads], *strides(k), *strides(made[-1]),
        table(cos, a), table(cos, b), table(sin, a), table(sin, b),
        TWO=len(xs) == 2, TOGETHER=together, BACK=back, INTERLEAVED=tables.interleaved, PER_PAIR=tables.per_pair,
        Q_HEADS=tiles[0], K_HEADS=tiles[1], HALF=block, REST=power_of_2(rest) if rest else 0,
        num_warps=max(4 if rest else 1, min(8, max(tiles) * block // 512)),
    )  # fmt: skip
    return outs


def rope(x: Tensor, *given: Any, back: bool = False) -> Tensor:
    return _run([x], Tables(*given), back)[0]


def rope_qk(q: Tensor, k: Tensor, *given: Any, back: bool = False) -> tuple[Tensor, Tensor]:
    """By one kernel, where q and k have the same positions: in all dims but that of heads."""
    tables, same = Tables(*given), q.dim() == k.dim() and q.dtype == k.dtype and q.shape[-1] == k.shape[-1]
    if same and sum(bool(a != b) for a, b in zip(q.shape, k.shape, strict=True)) <= 1:
        of_q, of_k = _run([q, k], tables, back)
    else:
        (of_q,), (of_k,) = _run([q], tables, back), _run([k], tables, back)
    return of_q, of_k


rope_backward, rope_qk_backward = (functools.partial(run, back=True) for run in (rope, rope_qk))
