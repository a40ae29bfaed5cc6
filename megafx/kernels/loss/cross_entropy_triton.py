"""Cross entropy on CUDA: statistics in one pass, gradient in one pass; cross_entropy.py has the formulas and the ops.

Statistics: one row a program. A tile is [DEEP, WIDE] elements; its maximum over the DEEP rows, which one thread holds, is
taken before anything is exponentiated, so that lanes keep running maxima and sums of their own (1 + 1/DEEP exponentials an
element) and threads meet only once, at the end of the row. Gradient: one tile of a row a program, no loop.

Rows need not start on 16 bytes (V = 50257): tiles lie on multiples of 8 elements of the tensor, and the up to 7 elements
before the first and after the last whole group are read apart. Nothing is copied to fp32; fp16 gradients are rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common.op import launch, new_like
from megafx.kernels.common.tiles_triton import exp, power_of_2
from megafx.kernels.loss.cross_entropy_reference import Loss, local_stats, plain_gradient
from megafx.placements.types import Piece

STATISTICS_TILE = (4, 1024)  # DEEP, WIDE; the fastest of those tried on an H200
FEW_ROWS = 256  # that leave a multiprocessor no more than two: wider tiles then
GRADIENT_TILE = 2048  # likewise


@triton.jit
def _edges(start, end, first, last):
    """Where a row lies outside of [first, last): less than 8 elements on either side; which of them there are. [16]

    It takes no pointer: Inductor would think that one is written to, because stores go to what this returns.
    """
    lane = tl.arange(0, 16)
    low = start + lane
    high = tl.maximum(first, last) + lane - 8
    at = tl.where(lane < 8, low, high)
    inside = tl.where(lane < 8, low < tl.minimum(first, end), (lane >= 8) & (high < end))
    return at, inside


@triton.jit
def row_statistics(x, start, V, SUM: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr):
    """Elements [start, start + V) of x -> max, sum exp(x - max), sum x. fp32. A row of -inf: sum 0, as of no element."""
    end = start + V
    first = (start + 7) // 8 * 8
    last = end // 8 * 8
    high = tl.full([WIDE], -float("inf"), tl.float32)
    total = tl.zeros([WIDE], tl.float32)
    summed = tl.zeros([WIDE], tl.float32)
    lanes = tl.arange(0, DEEP)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    for k in range(first, last - (DEEP * WIDE - 1), DEEP * WIDE):
        v = tl.load(x + k // 8 * 8 + lanes).to(tl.float32)
        top = tl.maximum(high, tl.max(v, 0))
        safe = tl.where(top == -float("inf"), 0.0, top)
        total = total * exp(high - safe) + tl.sum(exp(v - safe[None, :]), 0)
        if SUM:
            summed += tl.sum(v, 0)
        high = top
    k = first + tl.maximum(last - first, 0) // (DEEP * WIDE) * (DEEP * WIDE)
    if k < last:
        inside = lanes < last - k
        v = tl.load(x + k // 8 * 8 + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.maximum(high, tl.max(v, 0))
        safe = tl.where(top == -float("inf"), 0.0, top)
        total = total * exp(high - safe) + tl.sum(exp(v - safe[None, :]), 0)
        summed += tl.sum(tl.where(inside, v, 0.0), 0)
        high = top
    at, inside = _edges(start, end, first, last)
    edge = tl.load(x + at, mask=inside, other=-float("inf")).to(tl.float32)
    row_high = tl.maximum(tl.max(high, 0), tl.max(edge, 0))
    safe_high = tl.where(row_high == -float("inf"), 0.0, row_high)
    row_total = tl.sum(total * exp(high - safe_high), 0) + tl.sum(exp(edge - safe_high), 0)
    row_sum = tl.sum(summed, 0) + tl.sum(tl.where(inside, edge, 0.0), 0)
    return row_high, row_total, row_sum


@triton.jit
def token_loss(high, total, picked, summed, smoothing, classes):
    loss = tl.log(total) + (1.0 - smoothing) * (high - picked)
    if smoothing != 0.0:  # not added as 0 * (...): classes masked with -inf make the mean -inf
        loss += smoothing * (high - summed / classes)
    return loss


@triton.jit
def _forward(
    logits,  # [T, V] fp16/bf16/fp32 IN, rows `stride` apart
    target,  # [T] any integer IN
    loss,  # [T] fp32 OUT
    norm,  # [T, 2] fp32 OUT
    ok,  # [] int32 OUT: 0 where a target is out of bounds
    stride, V, ignore_index, smoothing,
    SUM: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = row * stride
    high, total, summed = row_statistics(logits, start, V, SUM, DEEP, WIDE)
    y = tl.load(target + row).to(tl.int64)
    ignored = y == ignore_index
    inside = (y >= 0) & (y < V)
    picked = tl.load(logits + start + y, mask=inside, other=0.0).to(tl.float32)
    value = token_loss(high, total, picked, summed, smoothing, V)
    tl.store(loss + row, tl.where(ignored, 0.0, value))
    tl.store(norm + row * 2, high)
    tl.store(norm + row * 2 + 1, tl.log(total))
    tl.store(ok, 0, mask=(inside | ignored) == 0)


@triton.jit
def _stats(
    logits,  # [T, V_local] fp16/bf16/fp32 IN, rows `stride` apart
    target,  # [T] any integer IN, global classes
    out,  # [T, 4] fp32 OUT: max, sum exp(x - max), x at the target or 0, sum x
    stride,
    class_start,  # this rank's classes: [class_start, class_start + V), in columns from column_start
    column_start, V,
    SUM: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = row * stride + column_start
    high, total, summed = row_statistics(logits, start, V, SUM, DEEP, WIDE)
    y = tl.load(target + row).to(tl.int64) - class_start
    picked = tl.load(logits + start + y, mask=(y >= 0) & (y < V), other=0.0).to(tl.float32)
    tl.store(out + row * 4, high)
    tl.store(out + row * 4 + 1, total)
    tl.store(out + row * 4 + 2, picked)
    tl.store(out + row * 4 + 3, summed)


@triton.jit
def _combine(
    stats,  # [t, T, 4] fp32 IN
    target,  # [T] any integer IN
    loss,  # [T] fp32 OUT
    norm,  # [T, 2] fp32 OUT
    ok,  # [] int32 OUT
    T, t, ignore_index, smoothing, classes,
    B: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = rows < T
    high = tl.full([B], -float("inf"), tl.float32)
    for k in range(t):
        high = tl.maximum(high, tl.load(stats + (k * T + rows) * 4, mask=inside, other=-float("inf")))
    safe = tl.where(high == -float("inf"), 0.0, high)
    total = tl.zeros([B], tl.float32)
    picked = tl.zeros([B], tl.float32)
    summed = tl.zeros([B], tl.float32)
    for k in range(t):
        at = stats + (k * T + rows) * 4
        shift = exp(tl.load(at, mask=inside, other=-float("inf")) - safe)
        total += tl.load(at + 1, mask=inside, other=0.0) * shift
        picked += tl.load(at + 2, mask=inside, other=0.0)
        summed += tl.load(at + 3, mask=inside, other=0.0)
    y = tl.load(target + rows, mask=inside, other=0).to(tl.int64)
    ignored = y == ignore_index
    value = token_loss(high, total, picked, summed, smoothing, classes)
    tl.store(loss + rows, tl.where(ignored, 0.0, value), mask=inside)
    tl.store(norm + rows * 2, high, mask=inside)
    tl.store(norm + rows * 2 + 1, tl.log(total), mask=inside)
    tl.store(ok + tl.zeros([B], tl.int32), 0, mask=inside & (((y >= 0) & (y < classes)) | ignored == 0))


@triton.jit
def _gradient(
    grad,  # [T] fp32 IN, `grad_stride` apart
    logits,  # [T, V_local] fp16/bf16/fp32 IN
    target,  # [T] any integer IN, global classes
    norm,  # [T, 2] fp32 IN
    lse_grad,  # [T] fp32 IN, `lse_stride` apart; not read unless LSE
    out,  # [T, V_local] as logits, OUT
    grad_stride, lse_stride, stride, out_stride, class_start, column_start, V, ignore_index, smoothing, classes,
    tiles,  # programs a row
    SAME: tl.constexpr,  # rows of logits and out start alike modulo 8
    LSE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Whole groups of 8 elements of `out` by tiles; what a row has outside of them, by its first program."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * N
    start = row * out_stride + column_start
    shift = row * (stride - out_stride)  # from elements of out to elements of logits
    y = tl.load(target + row).to(tl.int64)
    g = tl.load(grad + row * grad_stride).to(tl.float32)
    high = tl.load(norm + row * 2)
    log_total = tl.load(norm + row * 2 + 1)
    ignored = y == ignore_index
    hot = start + y - class_start  # the target's element, if it is one of this row
    warm = 1.0 - smoothing
    cold = smoothing / classes
    begin = (start + 7) // 8 * 8
    end = (start + V) // 8 * 8
    k = first + tl.arange(0, N)
    inside = k < (end - begin).to(tl.int32)
    at = begin + k
    from_at = shift // 8 * 8 + at if SAME else shift + at
    x = tl.load(logits + from_at, mask=inside, other=0.0).to(tl.float32)
    p = exp((x - high) - log_total)
    z = p - cold - tl.where(k == (hot - begin).to(tl.int32), warm, 0.0)
    value = tl.where(ignored, 0.0, z * g)
    if LSE:
        h = tl.load(lse_grad + row * lse_stride).to(tl.float32)
        value += p * h
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    if first == 0:
        edge_at, rest = _edges(start, start + V, begin, end)
        edge = tl.load(logits + shift + edge_at, mask=rest, other=-float("inf")).to(tl.float32)
        edge_p = exp((edge - high) - log_total)
        edge_z = edge_p - cold - tl.where(edge_at == hot, warm, 0.0)
        edge_value = tl.where(ignored, 0.0, edge_z * g)
        if LSE:
            edge_value += edge_p * h
        tl.store(out + edge_at, edge_value.to(out.dtype.element_ty), mask=rest)


@triton.jit
def _scale(x, out, factor, total, N: tl.constexpr):  # [total] IN, OUT, [] IN
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    value = tl.load(x + i, mask=i < total, other=0.0).to(tl.float32)
    value = tl.where(value == 0.0, 0.0, value * tl.load(factor).to(tl.float32))  # ignored tokens, factor infinite
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < total)


# -- launchers: logits with unit stride in the last dim, at least one row


def statistics_config(rows: int, columns: int) -> dict[str, int]:
    deep, wide = STATISTICS_TILE
    if rows <= FEW_ROWS and columns >= 4 * deep * wide:
        return {"DEEP": deep, "WIDE": 4 * wide, "num_warps": 16}
    if columns >= deep * wide:
        return {"DEEP": deep, "WIDE": wide, "num_warps": 4}
    wide = max(32, min(wide, power_of_2(max(columns, 1)) // 4))
    return {"DEEP": 4, "WIDE": wide, "num_warps": max(1, wide // 256)}


def _rows_apart(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def check_async(ok: Tensor, classes: int) -> None:
    torch._assert_async(ok, f"cross entropy: a target is out of bounds of {classes} classes")


def forward(logits: Tensor, target: Tensor, ignore_index: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Whole vocabulary: loss [T] and norm [T, 2]."""
    logits, target = _rows_apart(logits), target.contiguous()
    rows, columns = logits.shape
    loss = logits.new_empty(rows, dtype=torch.float32)
    norm = logits.new_empty(rows, 2, dtype=torch.float32)
    ok = torch.ones((), dtype=torch.int32, device=logits.device)
    if rows:
        launch(
            _forward, (rows,), logits,
            logits, target, loss, norm, ok, logits.stride(0), columns, ignore_index, smoothing,
            SUM=smoothing != 0, **statistics_config(rows, columns),
        )  # fmt: skip
    check_async(ok, columns)
    return loss, norm


def stats(logits: Tensor, target: Tensor, piece: Piece) -> Tensor:
    """Statistics [T, 4] of one run of classes."""
    logits, target = _rows_apart(logits), target.contiguous()
    out = logits.new_empty(len(target), 4, dtype=torch.float32)
    if len(target):
        launch(
            _stats, (len(target),), logits,
            logits, target, out, logits.stride(0), piece.global_start, piece.local_start, piece.length,
            SUM=True, **statistics_config(len(target), piece.length),
        )  # fmt: skip
    return out


def combine(all_stats: Tensor, target: Tensor, how: Loss, check: bool) -> tuple[Tensor, Tensor]:
    """[t, T, 4] -> loss [T], norm [T, 2] of the whole vocabulary. check: that targets are classes."""
    all_stats, target = all_stats.contiguous(), target.contiguous()
    t, rows, _ = all_stats.shape
    loss = all_stats.new_empty(rows)
    norm = all_stats.new_empty(rows, 2)
    ok = torch.ones((), dtype=torch.int32, device=all_stats.device)
    if rows:
        launch(
            _combine, (triton.cdiv(rows, 128),), all_stats,
            all_stats, target, loss, norm, ok, rows, t, how.ignore_index, how.smoothing, how.classes,
            B=128, num_warps=4,
        )  # fmt: skip
    if check:
        check_async(ok, how.classes)
    return loss, norm


def gradient(
    grad: Tensor, logits: Tensor, target: Tensor, norm: Tensor, how: Loss, out: Tensor | None = None,
    lse_grad: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of one run of classes; 0 in columns outside of it. out: where to write it, possibly `logits` itself."""
    logits, target, norm = _rows_apart(logits), target.contiguous(), norm.contiguous()
    (piece,) = how.pieces
    rows, columns = logits.shape
    if out is None:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if piece.length != columns:
        out[:, : piece.local_start].zero_()
        out[:, piece.local_start + piece.length :].zero_()
    if rows and piece.length:
        same = logits.stride(0) % 8 == out.stride(0) % 8
        tile = min(GRADIENT_TILE, max(128, power_of_2(piece.length)))
        tiles = triton.cdiv(piece.length, tile)
        launch(
            _gradient, (rows * tiles,), logits,
            grad, logits, target, norm, grad if lse_grad is None else lse_grad, out, grad.stride(0),
            0 if lse_grad is None else lse_grad.stride(0), logits.stride(0), out.stride(0), piece.global_start,
            piece.local_start, piece.length, how.ignore_index, how.smoothing, how.classes, tiles,
            SAME=same, LSE=lse_grad is not None, N=tile, num_warps=4 if tile >= 1024 else 1,
        )  # fmt: skip
    return out


# -- what ops call


def backward(
    grad: Tensor, logits: Tensor, target: Tensor, norm: Tensor, lse_grad: Tensor | None, ignore_index: int,
    smoothing: float,
) -> Tensor:  # fmt: skip
    return gradient(grad, logits, target, norm, Loss.whole(ignore_index, smoothing, logits), None, lse_grad)


def rank_statistics(logits: Tensor, target: Tensor, *shard: Any) -> Tensor:
    pieces = Loss.of_rank(0, 0.0, *shard).pieces
    return stats(logits, target, pieces[0]) if len(pieces) == 1 else local_stats(logits, target, pieces)


def ranks_loss(
    logits: Tensor, target: Tensor, all_stats: Tensor, ignore_index: int, smoothing: float, lse: bool, *shard: Any
) -> Tensor:
    loss, norm = combine(all_stats, target, Loss.of_rank(ignore_index, smoothing, *shard), True)
    return torch.stack([loss, norm.sum(1)]) if lse else loss


def ranks_backward(
    grad: Tensor, logits: Tensor, target: Tensor, all_stats: Tensor, lse_grad: Tensor | None, ignore_index: int,
    smoothing: float, *shard: Any,
) -> Tensor:  # fmt: skip
    how = Loss.of_rank(ignore_index, smoothing, *shard)
    norm = combine(all_stats, target, how, False)[1]
    make = gradient if len(how.pieces) == 1 else plain_gradient
    return make(grad, logits, target, norm, how, None, lse_grad)


def linear_cross_entropy_backward(x: Tensor, factor: Tensor) -> Tensor:
    """x times a 0-d factor that lies on the device."""
    x = x.contiguous()
    return _scaled(x, factor, new_like(x))


def linear_cross_entropy_backward_(x: Tensor, factor: Tensor) -> Tensor:
    """The same over x, which is contiguous."""
    return _scaled(x, factor, x)


def _scaled(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    if x.numel():
        launch(_scale, (triton.cdiv(x.numel(), 4096),), x, x, out, factor, x.numel(), N=4096, num_warps=4)
    return out
