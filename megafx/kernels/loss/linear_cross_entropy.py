"""megafx::linear_cross_entropy: the sum over tokens of the cross entropy of a linear layer, without its logits.

    logits = x W^T + b          x [T, K], weight [V, K], bias [V] or none, target [T]
    loss = sum_t cross_entropy(logits_t, target_t)          cross_entropy.py: ignore_index, label smoothing; fp32, 0-d

Tokens go in chunks: a chunk's logits are made, become its loss and then, in place, the gradient of that, which goes into dx and
dweight before the next chunk. So forward computes the gradients too, for an upstream gradient of 1, and backward scales them
(in fp32, rounded once more): three products in all, as without chunks. Its form `_fp32` gives the weight's gradient in fp32.
There is never more than a chunk of logits (logits_chunks.py): CHUNK_BYTES, but no less than an eighth of the tokens, so that
the weight's gradient, summed over chunks in its own dtype, is rounded 8 times at most. Without gradients (evaluation) forward
makes the loss alone. Saved: the gradients of x, weight and bias.

For whole vocabularies, on one rank's tokens; vocab_linear_cross_entropy.py is for sharded ones.
Source of the idea: Liger-Kernel's fused linear cross entropy (Hsu et al. 2024, 2410.10989), which chunks more finely.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import MATMUL, fixed, ids, real
from megafx.kernels.common.op import InPlace, define_composite, define_gradient, define_op, new_like, wide
from megafx.kernels.loss.cross_entropy import logits_gradient, token_losses
from megafx.kernels.loss.cross_entropy_reference import Loss
from megafx.kernels.loss.logits_chunks import FP16_FACTOR, LayerGradients, LogitsChunks, chunk_bytes


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1] or target.shape != x.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy needs x [T, K], weight [V, K] and target [T], got {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_cross_entropy: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *how: Any, fp32: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss [], and with `gradients` those of x, weight and bias (empty otherwise, and that of no bias)."""
    check_linear(x, weight, bias, target)
    ignore_index, smoothing, gradients = how
    bias_dtype = weight.dtype if bias is None else bias.dtype
    chunks = LogitsChunks(x, weight, bias)
    loss, made = loss_and_gradients(chunks, target, ignore_index, smoothing, gradients, fp32)
    if made is None:
        return loss, x.new_empty(0), weight.new_empty(0), weight.new_empty(0, dtype=bias_dtype)
    db = weight.new_empty(0) if made.bias is None else made.bias
    return loss, made.x, made.weight, db.to(bias_dtype)


def loss_and_gradients(
    chunks: LogitsChunks, target: Tensor, ignore_index: int, smoothing: float, gradients: bool, fp32: bool
) -> tuple[Tensor, LayerGradients | None]:
    """loss [], and with `gradients` those for an upstream gradient of 1, no larger than 1 at any logit."""
    target, dtype, x = target.contiguous(), chunks.dtype, chunks.x
    factor = FP16_FACTOR if dtype == torch.float16 else 1.0
    bound = functools.partial(torch.full, (), factor, dtype=wide(dtype), device=x.device)
    made = chunks.gradients(factor, fp32, bound) if gradients else None
    losses = [x.new_zeros((), dtype=wide(dtype))]
    for rows, logits in chunks:
        loss, norm = token_losses(logits, target[rows], ignore_index, smoothing)
        losses.append(loss.sum())
        if made is not None:
            each = torch.full((1,), factor, dtype=loss.dtype, device=loss.device).expand(len(loss))
            how = Loss.whole(ignore_index, smoothing, logits)
            logits_gradient(each, logits, target[rows], norm, how, out=logits)
            made.add(rows)
    return torch.stack(losses).sum(), made


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *how: Any, fp32: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_linear(x, weight, bias, target)
    loss = x.new_empty((), dtype=wide(x.dtype))
    bias_like = weight if bias is None else bias
    if not how[-1]:  # gradients
        return loss, x.new_empty(0), weight.new_empty(0), bias_like.new_empty(0)
    db = bias_like.new_empty(0 if bias is None else weight.shape[0])
    dw = weight.new_empty(weight.shape, dtype=wide(weight.dtype) if fp32 else weight.dtype)
    return loss, torch.empty(x.shape, dtype=x.dtype, device=x.device), dw, db


for _name, _fp32 in (("linear_cross_entropy_forward", False), ("linear_cross_entropy_forward_fp32", True)):
    define_op(
        f"{_name}(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, "
        "float label_smoothing, bool gradients) -> (Tensor, Tensor, Tensor, Tensor)",
        rule="sum: t k!, v! k!, v!, ~t -> ; t k!; v! k!; v!",
        samples=[(fixed(4, 6), fixed(6, 6), fixed(6), ids(6, 4), -100, 0.1, True)],
        cost=MATMUL,
        terms=lambda x, w, bias, target, index, smoothing, gradients: x[0] * x[1] * w[0] * (3 if gradients else 1),
        reference=functools.partial(forward, fp32=_fp32),
        fake=functools.partial(_fake, fp32=_fp32),
        workspace=lambda args, itemsize: chunk_bytes(args[0], args[1], itemsize),
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
    samples=[(real(4, 6), real(6, 6), real(6), ids(6, 4), -100, 0.1)],
    body=_body,
)


def _saves(ctx, inputs, output) -> None:
    _, dx, dw, db = output
    ctx.mark_non_differentiable(dx, dw, db)
    ctx.set_materialize_grads(False)
    ctx.bias = inputs[2] is not None
    ctx.save_for_backward(dx, dw, db)


def _backward(ctx, grad: Tensor | None, *_):
    if grad is None:
        return (None,) * 7
    dx, dw, db = (torch.ops.megafx.linear_cross_entropy_backward(saved, grad) for saved in ctx.saved_tensors)
    return dx, dw, db if ctx.bias else None, None, None, None, None


def _scaled(saved: Tensor, grad: Tensor) -> Tensor:
    """saved times grad; zeros stay zeros: a mean over no label at all has an infinite gradient, not for ignored tokens."""
    return (saved.to(grad.dtype) * grad).masked_fill_(saved == 0, 0.0)


_KERNEL = "loss.cross_entropy_triton:linear_cross_entropy_backward"
define_op(
    "linear_cross_entropy_backward(Tensor saved, Tensor grad) -> Tensor",
    rule="lin[0]: ..., ~ -> ...",
    samples=[(fixed(4, 6), fixed())],
    reference=lambda saved, grad: _scaled(saved, grad).to(saved.dtype).contiguous(),
    triton=_KERNEL,
    fake=lambda saved, grad: new_like(saved),
    inplace=InPlace("saved", lambda saved, grad: saved.copy_(_scaled(saved, grad)), f"{_KERNEL}_"),
)
define_gradient("linear_cross_entropy_forward", _backward, _saves)
