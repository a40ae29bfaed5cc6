"""megafx::linear_cross_entropy: the sum over tokens of the cross entropy of a linear layer, without its logits.

    logits = x W^T + b          x [T, K], weight [V, K], bias [V] or none, target [T]
    loss = sum_t cross_entropy(logits_t, target_t)          cross_entropy.py: ignore_index, label smoothing; fp32, 0-d

Tokens go in chunks: a chunk's logits are made, become its loss and then, in place, the gradient of that, which goes into
dx and dweight before the next chunk. So forward computes the gradients too, for an upstream gradient of 1, and backward
scales them (in fp32, rounded once more): three products in all, as without chunks. There is never more than a chunk of
logits: CHUNK_BYTES, but no less than an eighth of the tokens, so that the weight's gradient, summed over chunks in its own
dtype, is rounded 8 times at most. fp16: the logits' gradient is held times FP16_FACTOR, so that small probabilities survive.
Without gradients (evaluation) forward makes the loss alone. Saved: the gradients of x, weight and bias.

It is for whole vocabularies, on one rank's tokens; the logits of a sharded one are a t-th, and cross_entropy.py has its loss.
Source of the idea: Liger-Kernel's fused linear cross entropy (Hsu et al. 2024, 2410.10989), which chunks more finely.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..placements import Piece
from .cross_entropy import check_targets, ignored_tokens, local_stats, logits_gradient, loss_of, norm_of, on_gpu
from .op import define_composite, define_gradient, define_op, new_like, wide

CHUNK_BYTES = 1 << 30  # measured on an H200 at [8192, 4096] x [128256, 4096]: 1.075 of the products; 512 MiB 1.126
MOST_CHUNKS = 8
FP16_FACTOR = 1024.0


def chunk_rows(tokens: int, classes: int, itemsize: int) -> int:
    """Tokens a chunk, a multiple of 128; chunks are of about the same size."""
    fit = max(1, CHUNK_BYTES // max(1, classes * itemsize))
    chunks = min(MOST_CHUNKS, max(1, -(-tokens // fit)))
    return max(128, -(-tokens // (chunks * 128)) * 128)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1] or target.shape != x.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy needs x [T, K], weight [V, K] and target [T], got {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_cross_entropy: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss [], and with `gradients` those of x, weight and bias (empty otherwise, and that of no bias)."""
    check_linear(x, weight, bias, target)
    (tokens, classes), dtype = (len(x), len(weight)), x.dtype
    x, target = x.contiguous(), target.contiguous()
    step = chunk_rows(tokens, classes, x.element_size())
    factor = FP16_FACTOR if dtype == torch.float16 and gradients else 1.0
    losses = []
    dx = torch.empty_like(x) if gradients else x.new_empty(0)
    dw = torch.zeros_like(weight) if gradients and not tokens else weight.new_empty(weight.shape if gradients else 0)
    db = weight.new_zeros(classes if gradients and bias is not None else 0, dtype=wide(x.dtype))
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        logits = F.linear(x[rows], weight, bias)
        loss, grad = _chunk(logits, target[rows], ignore_index, label_smoothing, factor, gradients)
        losses.append(loss.sum())
        if grad is None:
            continue
        torch.mm(grad, weight, out=dx[rows])
        if start:
            dw.addmm_(grad.t(), x[rows])
        else:
            torch.mm(grad.t(), x[rows], out=dw)
        if bias is not None:
            db += grad.sum(0, dtype=db.dtype)
    if factor != 1.0:
        dx, dw, db = dx.div_(factor), dw.div_(factor), db.div_(factor)
    total = torch.stack(losses).sum() if losses else x.new_zeros((), dtype=wide(x.dtype))
    return total, dx, dw, db.to(weight.dtype if bias is None else bias.dtype)


def _chunk(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, factor: float, gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """Loss of each token, and factor * its gradient by the logits, in their place."""
    classes = logits.shape[1]
    pieces = [Piece(0, 0, classes)]
    if on_gpu(logits):
        from . import cross_entropy_triton

        loss, norm = cross_entropy_triton.forward(logits, target, ignore_index, smoothing)
        if not gradients:
            return loss, None
        each = torch.full((1,), factor, device=loss.device).expand(len(loss))
        args = (ignore_index, smoothing, pieces[0], classes, logits)
        return loss, cross_entropy_triton.gradient(each, logits, target, norm, *args)
    check_targets(target, ignore_index, classes)
    stats = local_stats(logits, target, pieces)
    loss = loss_of(stats, ignored_tokens(target, ignore_index), smoothing, classes)
    if not gradients:
        return loss, None
    each = torch.full_like(loss, factor)
    return loss, logits_gradient(each, logits, target, norm_of(stats), ignore_index, smoothing, pieces, classes)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_linear(x, weight, bias, target)
    loss = x.new_empty((), dtype=wide(x.dtype))
    bias_like = weight if bias is None else bias
    if not gradients:
        return loss, x.new_empty(0), weight.new_empty(0), bias_like.new_empty(0)
    db = bias_like.new_empty(0 if bias is None else weight.shape[0])
    return loss, torch.empty(x.shape, dtype=x.dtype, device=x.device), weight.new_empty(weight.shape), db


define_op(
    "linear_cross_entropy_forward(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, "
    "float label_smoothing, bool gradients) -> (Tensor, Tensor, Tensor, Tensor)",
    rule="nl: t! k!, v! k!, v!, ~t! -> ; t! k!; v! k!; v!",
    reference=forward,
    fake=_fake,
)


def _body(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    wanted = any(a is not None and a.requires_grad for a in (x, weight, bias))
    args = (x, weight, bias, target, ignore_index, label_smoothing, torch.is_grad_enabled() and wanted)
    return torch.ops.megafx.linear_cross_entropy_forward(*args)[0]


define_composite(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, "
    "float label_smoothing) -> Tensor",
    rule="nl: t! k!, v! k!, v!, ~t! -> ",
    body=_body,
)


def _saves(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, dx, dw, db = output
    ctx.mark_non_differentiable(dx, dw, db)
    ctx.set_materialize_grads(False)
    ctx.bias = inputs[2] is not None
    ctx.save_for_backward(dx, dw, db)


def _backward(ctx, grad: Tensor | None, *_):  # type: ignore[no-untyped-def]
    if grad is None:
        return (None,) * 7
    dx, dw, db = (torch.ops.megafx.linear_cross_entropy_backward(saved, grad) for saved in ctx.saved_tensors)
    return dx, dw, db if ctx.bias else None, None, None, None, None


define_op(
    "linear_cross_entropy_backward(Tensor saved, Tensor grad) -> Tensor",
    rule="lin[0]: ..., ~ -> ...",
    reference=lambda saved, grad: (saved.to(grad.dtype) * grad).to(saved.dtype).contiguous(),
    triton="cross_entropy_triton:linear_cross_entropy_backward",
    fake=lambda saved, grad: new_like(saved),
)
define_gradient("linear_cross_entropy_forward", _backward, _saves)
