"""megafx::scale_mask_softmax: y = dropout(softmax(mask(scale * scores))), one pass over the scores in each direction.

    scores [..., S, T]; mask broadcast against them, or none; fp32 (fp64 for fp64) inside, y in the dtype of the scores

    z = scale * scores + mask        additive mask (floating). With a finite fill, its numbers up to -1e30 (fp16: -65504) are
                                     in the place of the scores, which have no gradient there
    z = fill                         where the mask is boolean and True, and
                                     where causal: key j > i + T - S;  window > 0: key j <= i + T - S - window
    y = exp(z - m) / sum exp(z - m)  m = max z over the row;  rounded to the dtype of the scores
    y = y * keep / (1 - p)           bits of philox.py at the index of the element in the whole result, as megafx::dropout

Fills are as written: -inf (a fully masked row is nan), finfo.min or -10000 (a fully masked row is uniform). Where something
is visible, a fill of -5000 or less counts as probability 0: scores that hide themselves are not for this op. Gradient:
dscores = scale * y * (dy - sum dy y), 0 at filled positions (they do not depend on the scores); an additive mask gets
dscores / scale, summed over the dims it broadcasts in.

Saved for backward: y where nothing is dropped (the product with the values saves it too), else the scores and two numbers
a row, (m, sum): the mask of the dropout is drawn again. Sharded in the leading dims; rows and keys stay whole.
megafx::sink_softmax has one more score of each head, its sink [N], that takes weight and gives none: what patterns put between
plain code and megafx::attention. Where that does not take it, it is computed as it was written.
Semantics: Megatron's FusedScaleMaskSoftmax without its shape gates. CUDA: masked_softmax_launch.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafx.ir.facts import SEED, fixed, real
from megafx.kernels.common import philox
from megafx.kernels.common.draw import DRAW, Draw, Run, check_draw, draws, runs_here
from megafx.kernels.common.op import define_composite, define_gradient, define_op, new_like, wide
from megafx.kernels.dropout.dropout import reference as dropped

HARD_FILL = -5000.0  # fills up to this count as probability 0 wherever something is visible
FILLS = -1e30  # the fill that says of an additive mask that what it hides was filled


def mask_floor(dtype: torch.dtype) -> float:
    """Additive masks up to this hide: the score does not count."""
    return -65504.0 if dtype == torch.float16 else -1e30


class How(NamedTuple):
    """What is done with the scores; the ops' arguments after the tensors, and before those of Draw."""

    scale: float
    causal: bool
    window: int
    fill: float

    @staticmethod
    def of(given: Sequence[Any]) -> tuple[How, Draw]:
        return How(*given[:4]), Draw(*given[4:])


def check_scores(scores: Tensor, mask: Tensor | None, draw: Draw) -> None:
    if scores.dim() < 2 or not scores.is_floating_point():
        raise ValueError(f"scale_mask_softmax needs floating scores [..., S, T], got {scores.dtype} {scores.shape}")
    if mask is not None and (mask.dim() > scores.dim() or not (mask.is_floating_point() or mask.dtype == torch.bool)):
        raise ValueError(f"scale_mask_softmax: mask {mask.dtype} {mask.shape} does not fit scores {scores.shape}")
    check_draw("scale_mask_softmax", draw)


def runs_of_scores(shape: Sequence[int], draw: Draw) -> list[Run]:
    """Where the local scores lie in the whole tensor; one run of all where nothing is drawn."""
    if draws(draw.p) and draw.shard_dim >= len(shape) - 2:
        raise ValueError(f"scale_mask_softmax is sharded in leading dims only, not in dim {draw.shard_dim} of {shape}")
    return runs_here(shape, draw)


def hidden_keys(s: int, t: int, causal: bool, window: int, device: torch.device) -> Tensor | None:
    """bool [S, T], True where a key is out of sight of a query by position."""
    if not causal and not window:
        return None
    last = torch.arange(s, device=device)[:, None] + (t - s)
    key = torch.arange(t, device=device)
    beyond = key > last if causal else torch.zeros(s, t, dtype=torch.bool, device=device)
    return beyond | (key <= last - window) if window else beyond


def _masked(scores: Tensor, mask: Tensor | None, how: How) -> tuple[Tensor, Tensor | None]:
    """(z, filled positions)."""
    z = scores.to(wide(scores.dtype)) * how.scale
    s, t = scores.shape[-2:]
    hidden = hidden_keys(s, t, how.causal, how.window, scores.device)
    if mask is not None and mask.dtype == torch.bool:
        hidden = mask if hidden is None else mask | hidden
    elif mask is not None:
        added = mask.to(z.dtype)
        z = z + added
        if mask.dtype == scores.dtype in (torch.bfloat16, torch.float16):  # the sum's own dtype absorbs scores
            z = torch.where(added <= HARD_FILL, z.to(mask.dtype).to(z.dtype), z)
        if how.fill > -math.inf:
            unseen = added <= mask_floor(scores.dtype)
            z = torch.where(unseen, added, z)
            z = z if hidden is None else z.masked_fill(hidden, how.fill)
            return z, unseen if hidden is None else unseen | hidden
    return (z if hidden is None else z.masked_fill(hidden, how.fill)), hidden


def _drop(y: Tensor, draw: Draw) -> Tensor:
    if philox.threshold(draw.p) == philox.DRAWS:
        return torch.zeros_like(y)
    return dropped(y.contiguous(), draw.seed, draw.p, draw.op_id, runs_of_scores(y.shape, draw))


def forward_reference(scores: Tensor, mask: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    """-> y, and (m, sum) of each row."""
    how, draw = How.of(given)
    check_scores(scores, mask, draw)
    z, _ = _masked(scores, mask, how)
    if not z.numel():
        return _empty(scores)
    high = z.amax(-1, keepdim=True)
    y = (z - high).exp_()
    total = y.sum(-1, keepdim=True)
    y = y.div_(total).to(scores.dtype)
    if draws(draw.p):
        y = _drop(y, draw)
    return y.contiguous(), torch.cat((high, total), -1).contiguous()  # also where the mask's dims are in another order


def backward_reference(grad: Tensor, saved: Tensor, mask: Tensor | None, stats: Tensor | None, *given: Any) -> Tensor:
    """saved: y, or with stats the scores."""
    how, draw = How.of(given)
    grad = grad.to(wide(saved.dtype))
    z, hidden = _masked(saved, mask, how)
    y = saved.to(grad.dtype)
    if stats is not None:
        y = (z - stats[..., :1]).exp_() / stats[..., 1:]
        grad = _drop(grad, draw)
    dz = y * (grad - (grad * y).sum(-1, keepdim=True)) * how.scale
    if hidden is not None:
        dz = dz.masked_fill(hidden, 0)
    return dz.to(saved.dtype).contiguous()


def _empty(scores: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return new_like(scores), scores.new_empty((*scores.shape[:-1], 2), dtype=wide(scores.dtype))


_HOW = f"float scale, bool causal, int window, float fill, {DRAW}"

define_op(
    f"scale_mask_softmax_forward(Tensor scores, Tensor? mask, {_HOW}) -> (Tensor, Tensor)",
    rule="nl: ... s! t!, ... s! t!, ~ -> ... s! t!; ... s! two!",
    samples=[(real(2, 4, 3, 4), None, 0.5, True, 0, -1e4, SEED, 0.0, 3, -1, [], "tp")],
    reference=forward_reference,
    triton="attention.masked_softmax_launch:forward",
    fake=_empty,
)
define_op(
    f"scale_mask_softmax_backward(Tensor grad, Tensor saved, Tensor? mask, Tensor? stats, {_HOW}) -> Tensor",
    rule="nl[0]: ... s! t!, ... s! t!, ... s! t!, ... s! two!, ~ -> ... s! t!",
    samples=[(real(2, 4, 3, 4), real(2, 4, 3, 4), None, None, 0.5, True, 0, -1e4, SEED, 0.0, 3, -1, [], "tp")],
    reference=backward_reference,
    triton="attention.masked_softmax_launch:backward",
    fake=lambda grad, saved, *rest: new_like(saved),
)
define_composite(
    f"scale_mask_softmax(Tensor scores, Tensor? mask, {_HOW}) -> Tensor",
    rule="nl: ... s! t!, ... s! t!, ~ -> ... s! t!",
    samples=[
        (real(2, 4, 3, 4), fixed(2, 1, 3, 4), 0.5, True, 0, -1e4, SEED, 0.5, 3, -1, [], "tp"),
        (real(2, 4, 3, 4), real(1, 4, 3, 4), 0.5, True, 0, -1e4, SEED, 0.0, 3, -1, [], "tp"),
    ],
    body=lambda *args: torch.ops.megafx.scale_mask_softmax_forward(*args)[0],
)


def _with_sink(scores: Tensor, mask: Tensor | None, sink: Tensor, *given: Any) -> Tensor:
    how, draw = How.of(given)
    check_scores(scores, mask, draw)
    z, _ = _masked(scores, mask, how)
    column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    plain: Any = (None, 1.0, False, 0, -math.inf, None, 0.0, 0, -1, [], "tp")
    y = torch.ops.megafx.scale_mask_softmax(torch.cat((z.to(scores.dtype), column), -1), *plain)[..., :-1]
    dropped_too: Tensor = torch.ops.megafx.dropout(y, *draw) if draws(draw.p) else y
    return dropped_too


define_composite(
    f"sink_softmax(Tensor scores, Tensor? mask, Tensor sink, {_HOW}) -> Tensor",
    rule="nl: b n s! t!, b n s! t!, n, ~ -> b n s! t!",
    samples=[(real(2, 4, 3, 4), fixed(2, 1, 3, 4), real(4), 0.5, True, 0, -1e4, None, 0.0, 3, -1, [], "tp")],
    body=_with_sink,
)


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    scores, mask, *given = inputs
    ctx.how, draw = How.of(given)
    ctx.rest = draw[1:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    if draws(draw.p):
        ctx.save_for_backward(scores, mask, output[1], draw.seed)
    else:
        ctx.save_for_backward(output[0], mask, None, None)


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 12
    saved, mask, stats, seed = ctx.saved_tensors
    dx = torch.ops.megafx.scale_mask_softmax_backward(grad, saved, mask, stats, *ctx.how, seed, *ctx.rest)
    dmask = None
    if ctx.needs_input_grad[1]:
        lead = dx.dim() - mask.dim()
        broadcast = [lead + d for d in range(mask.dim()) if mask.shape[d] == 1]
        dmask = dx.sum([*range(lead), *broadcast], keepdim=True, dtype=wide(dx.dtype)) if lead or broadcast else dx
        dmask = (dmask[(0,) * lead] / ctx.how.scale).to(mask.dtype)
    return dx, dmask, *(None,) * 10


define_gradient("scale_mask_softmax_forward", _backward, _saves)
