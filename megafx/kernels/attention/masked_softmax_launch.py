"""scale_mask_softmax on CUDA: the launchers. masked_softmax.py has formulas and ops, masked_softmax_triton.py the kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from megafx.kernels.attention.masked_softmax import HARD_FILL, How, check_scores, mask_floor, runs_of_scores
from megafx.kernels.attention.masked_softmax_triton import mask_bounds, masked_softmax
from megafx.kernels.common import philox
from megafx.kernels.common.draw import Draw
from megafx.kernels.common.op import as_bytes, launch, new_like

NO_MASK, BOOLEAN, ADDITIVE, FILLED = range(4)


def _mask_rows(mask: Tensor | None, scores: Tensor) -> tuple[Tensor, int, tuple[int, int, int, int]]:
    """The mask for the kernel, heads, and its strides by (batch, head, query, key); leading dims but two are folded."""
    if mask is None:
        return scores, 1, (0, 0, 0, 0)
    if mask.dtype == torch.bool:
        mask = as_bytes(mask)
    while mask.dim() < scores.dim():
        mask = mask.unsqueeze(0)
    if scores.dim() > 4:
        lead = scores.shape[:-3]
        mask = mask.expand(*lead, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    shape = (1, 1, *scores.shape)[-4:] if scores.dim() <= 4 else (-1, *scores.shape[-3:])
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if mask.stride(-1) not in (0, 1) and mask.shape[-1] != 1:
        mask = mask.contiguous()
    strides = [0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride(), strict=True)]
    return mask, shape[1], (strides[0], strides[1], strides[2], strides[3])


def _bounds_of(
    mask: Tensor, strides: tuple[int, int, int, int], t: int, kind: int, floor: float, full: int
) -> tuple[Tensor, tuple[int, int, int]]:
    """What each row of the mask leaves visible, and the strides of these rows by (batch, head, query)."""
    if kind == NO_MASK:
        return mask, (0, 0, 0)
    m0, m1, m2 = mask.shape[:3]
    out = torch.empty((m0 * m1 * m2, 4), dtype=torch.int32, device=mask.device)
    warps = max(1, min(16, full // 1024))
    launch(
        mask_bounds, (m0 * m1 * m2,), mask,
        mask, out, m1, m2, *strides[:3], t, floor,
        MASK=kind, KEYS=strides[3], B=full, num_warps=warps,
    )  # fmt: skip
    return out, (m1 * m2 if m0 > 1 else 0, m2 if m1 > 1 else 0, 1 if m2 > 1 else 0)


def _launch(
    grad: Tensor | None, source: Tensor, out: Tensor, stats: Tensor, mask: Tensor | None, how: How, draw: Draw
) -> None:
    """Fills `out`, and forward (without grad) `stats`."""
    s, t = source.shape[-2:]
    threshold = philox.threshold(draw.p)
    drop = 0 < threshold < philox.DRAWS
    full = 16
    while full < t:  # the power of two from t on; t may be symbolic, and then has bounds from here on
        full *= 2
    each = max(1, 1024 // full)
    eights = bool(t % 8 == 0)
    hard = how.fill <= HARD_FILL
    added = FILLED if how.fill > -math.inf else ADDITIVE
    kind = NO_MASK if mask is None else BOOLEAN if mask.dtype == torch.bool else added
    shown, heads, strides = _mask_rows(mask, source)
    bounds, bound_strides = _bounds_of(shown, strides, t, kind, mask_floor(source.dtype), full)
    # Drawing again takes registers: 165 a thread at 1024. Rows that start anywhere take loads of one key.
    keys_a_warp = 512 if (drop and grad is not None) or not eights else 1024
    warps = max(1, min(32, full // keys_a_warp))
    if grad is not None and not drop and eights:
        warps = min(warps, 4)  # long rows: two sums for each of few warps cost less than barriers of many
    for run in runs_of_scores(source.shape, draw):
        aligned = bool(eights and run.global_start % 8 == 0 and (run.rows == 1 or run.global_stride % 8 == 0))
        piece = run.length // t
        rows = run.rows * piece
        launch(
            masked_softmax, (triton.cdiv(rows, each),), source,
            source if grad is None else grad, source, out, stats, shown,
            source if draw.seed is None else draw.seed.to(source.device),
            rows, piece, run.local_start // t, run.local_stride // t, run.global_start, run.global_stride,
            s, t, heads, *strides[:3], bounds, *bound_strides, how.window, mask_floor(source.dtype),
            how.scale, how.fill, philox.scale(draw.p) if drop else 1.0, threshold, draw.op_id,
            BACK=grad is not None, CAUSAL=how.causal, WINDOW=how.window > 0, MASK=kind, KEYS=strides[3], DROP=drop,
            ALIGNED=aligned, EIGHTS=eights, EVEN=bool(t == full), HARD=hard,
            SPLIT=hard and each == 1 and full >= 512 and (how.causal or mask is not None),
            ONE_PIECE=bool(run.rows == 1), R=each, FULL=full, num_warps=warps,
        )  # fmt: skip


def forward(scores: Tensor, mask: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    how, draw = How.of(given)
    check_scores(scores, mask, draw)
    scores = scores.contiguous()
    y = new_like(scores)
    stats = torch.empty((*scores.shape[:-1], 2), dtype=torch.float32, device=scores.device)
    if y.numel():
        _launch(None, scores, y, stats, mask, how, draw)
    return (torch.zeros_like(y) if philox.threshold(draw.p) == philox.DRAWS else y), stats


def backward(grad: Tensor, saved: Tensor, mask: Tensor | None, stats: Tensor | None, *given: Any) -> Tensor:
    how, draw = How.of(given)
    if philox.threshold(draw.p) == philox.DRAWS:
        return torch.zeros_like(saved)
    saved, grad = saved.contiguous(), grad.contiguous()
    dx = new_like(saved)
    if dx.numel():
        _launch(grad, saved, dx, saved if stats is None else stats.contiguous(), mask, how, draw)
    return dx
