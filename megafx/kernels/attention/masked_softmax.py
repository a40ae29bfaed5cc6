"""megafx::scale_mask_softmax: y = dropout(softmax(mask(scale * scores))), one pass over the scores in each direction.

    scores [..., S, T]; mask broadcast against them, or none; fp32 (fp64 for fp64) inside, y in the dtype of the scores

    z = scale * scores + mask        additive mask (floating); where mask <= -1e30 (fp16 scores: -65504), z = mask
    z = fill                         where the mask is boolean and True, and
                                     where causal: key j > i + T - S;  window > 0: key j <= i + T - S - window
    y = exp(z - m) / sum exp(z - m)  m = max z over the row;  rounded to the dtype of the scores
    y = y * keep / (1 - p)           bits of philox.py by the index of the element in the whole result, as megafx::dropout

Fills are as written: -inf (a fully masked row is nan), finfo.min or -10000 (a fully masked row is uniform). Where something
is visible, a fill of -5000 or less counts as probability 0. Gradient: dscores = scale * y * (dy - sum dy y), 0 at filled
positions (they do not depend on the scores); an additive mask gets dscores / scale, summed over the dims it broadcasts in.

Saved for backward: y where nothing is dropped (the product with the values saves it too), else the scores and two numbers
a row, (m, sum): the mask of the dropout is drawn again. Sharded in the leading dims; rows and keys stay whole.
Semantics: Megatron's FusedScaleMaskSoftmax without its shape gates. CUDA: kernels/attention/masked_softmax_launch.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafx.ir.facts import SEED, fixed, real
from megafx.kernels.common import philox
from megafx.kernels.common.op import define_composite, define_gradient, define_op, new_like, wide
from megafx.kernels.common.runs import Run, runs_of
from megafx.kernels.dropout.dropout import reference as dropped
from megafx.ops import axes

HARD_FILL = -5000.0  # fills up to this count as probability 0 wherever something is visible


def mask_floor(dtype: torch.dtype) -> float:
    """Additive masks up to this hide: the score does not count."""
    return -65504.0 if dtype == torch.float16 else -1e30


def check_scores(scores: Tensor, mask: Tensor | None, p: float, op_id: int) -> None:
    if scores.dim() < 2 or not scores.is_floating_point():
        raise ValueError(f"scale_mask_softmax needs floating scores [..., S, T], got {scores.dtype} {scores.shape}")
    if mask is not None and (mask.dim() > scores.dim() or not (mask.is_floating_point() or mask.dtype == torch.bool)):
        raise ValueError(f"scale_mask_softmax: mask {mask.dtype} {mask.shape} does not fit scores {scores.shape}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must be between 0 and 1, got {p}")
    if not 0 <= op_id <= philox.MASK:
        raise ValueError(f"dropout op_id must be an unsigned 32-bit number, got {op_id}")


def runs_of_scores(shape: Sequence[int], p: float, shard_dim: int, layout: Sequence[int], axis: str) -> list[Run]:
    """Where the local scores lie in the whole tensor; one run of all where nothing is drawn."""
    if philox.threshold(p) == 0:
        return runs_of(shape, -1, [], 0, 1)
    before = axes.batch_rank(axis)
    if shard_dim < 0:
        return runs_of(shape, -1, [], 0, 1, before)
    if shard_dim >= len(shape) - 2:
        raise ValueError(f"scale_mask_softmax is sharded in leading dims only, not in dim {shard_dim} of {shape}")
    return runs_of(shape, shard_dim, layout, axes.axis_rank(axis), axes.axis_size(axis), before)


def hidden_keys(s: int, t: int, causal: bool, window: int, device: torch.device) -> Tensor | None:
    """bool [S, T], True where a key is out of sight of a query by position."""
    if not causal and not window:
        return None
    last = torch.arange(s, device=device)[:, None] + (t - s)
    key = torch.arange(t, device=device)
    beyond = key > last if causal else torch.zeros(s, t, dtype=torch.bool, device=device)
    return beyond | (key <= last - window) if window else beyond


def _masked(
    scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int, fill: float
) -> tuple[Tensor, Tensor | None]:
    """(z, filled positions)."""
    z = scores.to(wide(scores.dtype)) * scale
    s, t = scores.shape[-2:]
    hidden = hidden_keys(s, t, causal, window, scores.device)
    if mask is not None and mask.dtype == torch.bool:
        hidden = mask if hidden is None else mask | hidden
    elif mask is not None:
        added = mask.to(z.dtype)
        z = torch.where(added <= mask_floor(scores.dtype), added, z + added)
    return (z if hidden is None else z.masked_fill(hidden, fill)), hidden


def forward_reference(
    scores: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    fill: float,
    seed: Tensor | None,
    p: float,
    op_id: int,
    shard_dim: int,
    layout: Sequence[int],
    axis: str,
) -> tuple[Tensor, Tensor]:
    check_scores(scores, mask, p, op_id)
    z, _ = _masked(scores, mask, scale, causal, window, fill)
    if not z.numel():
        return new_like(scores), _no_stats(scores)
    high = z.amax(-1, keepdim=True)
    y = (z - high).exp_()
    total = y.sum(-1, keepdim=True)
    y = y.div_(total).to(scores.dtype)
    if philox.threshold(p):
        y = _drop(y, seed, p, op_id, runs_of_scores(scores.shape, p, shard_dim, layout, axis))
    return y.contiguous(), torch.cat((high, total), -1).contiguous()  # also where the mask's dims are in another order


def _drop(y: Tensor, seed: Tensor | None, p: float, op_id: int, runs: list[Run]) -> Tensor:
    if philox.threshold(p) == philox.DRAWS:
        return torch.zeros_like(y)
    assert seed is not None, "scale_mask_softmax drops: it needs a seed"
    return dropped(y.contiguous(), seed, p, op_id, runs)


def backward_reference(
    grad: Tensor,
    saved: Tensor,
    mask: Tensor | None,
    stats: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    fill: float,
    seed: Tensor | None,
    p: float,
    op_id: int,
    shard_dim: int,
    layout: Sequence[int],
    axis: str,
) -> Tensor:
    """saved: y, or with stats the scores."""
    grad = grad.to(wide(saved.dtype))
    z, hidden = _masked(saved, mask, scale, causal, window, fill)
    y = saved.to(grad.dtype)
    if stats is not None:
        y = (z - stats[..., :1]).exp_() / stats[..., 1:]
        grad = _drop(grad, seed, p, op_id, runs_of_scores(saved.shape, p, shard_dim, layout, axis))
    dz = y * (grad - (grad * y).sum(-1, keepdim=True)) * scale
    if hidden is not None:
        dz = dz.masked_fill(hidden, 0)
    return dz.to(saved.dtype).contiguous()


def _no_stats(scores: Tensor) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], 2), dtype=wide(scores.dtype))


def _fake(scores: Tensor, mask: Tensor | None, *rest: object) -> tuple[Tensor, Tensor]:
    return new_like(scores), _no_stats(scores)


_HOW = (
    "float scale, bool causal, int window, float fill, "
    "Tensor? seed, float p, int op_id, int shard_dim, SymInt[] layout, str axis"
)

define_op(
    f"scale_mask_softmax_forward(Tensor scores, Tensor? mask, {_HOW}) -> (Tensor, Tensor)",
    rule="nl: ... s! t!, ... s! t!, ~ -> ... s! t!; ... s! two!",
    samples=[(real(2, 4, 3, 4), None, 0.5, True, 0, -1e4, SEED, 0.0, 3, -1, [], "tp")],
    reference=forward_reference,
    triton="attention.masked_softmax_launch:forward",
    fake=_fake,
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


def _saves(ctx, inputs, output) -> None:
    scores, mask, scale, causal, window, fill, seed, *rest = inputs
    ctx.how, ctx.rest = (scale, causal, window, fill), rest
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    if philox.threshold(rest[0]):
        ctx.save_for_backward(scores, mask, output[1], seed)
    else:
        ctx.save_for_backward(output[0], mask, None, None)


def _backward(ctx, grad: Tensor | None, _):
    if grad is None:
        return (None,) * 12
    saved, mask, stats, seed = ctx.saved_tensors
    dx = torch.ops.megafx.scale_mask_softmax_backward(grad, saved, mask, stats, *ctx.how, seed, *ctx.rest)
    dmask = None
    if ctx.needs_input_grad[1]:
        lead = dx.dim() - mask.dim()
        broadcast = [lead + d for d in range(mask.dim()) if mask.shape[d] == 1]
        dmask = dx.sum([*range(lead), *broadcast], keepdim=True, dtype=wide(dx.dtype)) if lead or broadcast else dx
        dmask = (dmask[(0,) * lead] / ctx.how[0]).to(mask.dtype)
    return dx, dmask, *(None,) * 10


define_gradient("scale_mask_softmax_forward", _backward, _saves)
