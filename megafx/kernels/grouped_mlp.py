"""megafx::grouped_mlp: the gated MLPs of a mixture of experts in one op, which can be split by experts.

    x [S, K], up [E, K, 2F], down [E, F, M], starts, ends int [E] -> y [S, M]

    y_s = glu(x_s up_e) down_e    for rows s of expert e: starts[e] <= s < ends[e]; rows of no expert are 0
    glu(g | u) = act(g) u         gate and up side by side, as glu_packed has them (act: as there)

passes/join_experts.py makes it of grouped_mm, glu_packed, grouped_mm where experts are to be split over the ranks: each then
has the weights and the range of rows of its own experts, and the results are summands. The three ops apart cannot be split
so, because what lies between them is not linear (expert parallelism: Lepikhin et al. 2020, 2006.16668).

The gradient computes the first product and the unit again: nothing of size [S, F] is kept. CUDA: the library's grouped
products (grouped_mm.py) on rows moved so that the rank's own come first; their ranges must follow one another, as sorted rows
have them. Else one MLP an expert, for which the ranges are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..op_families import Call, Row, family
from .glu import glu_packed_backward_reference, glu_packed_reference
from .grouped_mm import grouped_mm, grouped_mm_weight
from .op import define_gradient, define_op


def check_grouped_mlp(x: Tensor, up: Tensor, down: Tensor, starts: Tensor, ends: Tensor) -> None:
    if (
        x.dim() != 2
        or up.dim() != 3
        or down.dim() != 3
        or x.shape[1] != up.shape[1]
        or up.shape[2] != 2 * down.shape[1]
    ):
        raise ValueError(
            f"grouped_mlp needs x [S, K], up [E, K, 2F] and down [E, F, M], got {tuple(x.shape)}, {tuple(up.shape)}, "
            f"{tuple(down.shape)}"
        )
    if not up.shape[0] == down.shape[0] == starts.shape[0] == ends.shape[0]:
        raise ValueError(
            f"grouped_mlp: {up.shape[0]} and {down.shape[0]} experts for {starts.shape[0]} starts and {ends.shape[0]} ends"
        )


def _ranges(starts: Tensor, ends: Tensor) -> Iterator[tuple[int, slice]]:
    for e, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if start < end:
            yield e, slice(start, end)


def grouped_mlp(x: Tensor, up: Tensor, down: Tensor, starts: Tensor, ends: Tensor, act: str) -> Tensor:
    check_grouped_mlp(x, up, down, starts, ends)
    if x.is_cuda:
        return moved_grouped_mlp(x, up, down, starts, ends, act)
    y = x.new_zeros(x.shape[0], down.shape[2])
    for e, rows in _ranges(starts, ends):
        y[rows] += glu_packed_reference(x[rows] @ up[e], None, act) @ down[e]
    return y


def grouped_mlp_backward(
    grad: Tensor, x: Tensor, up: Tensor, down: Tensor, starts: Tensor, ends: Tensor, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dx [S, K], dup [E, K, 2F], ddown [E, F, M]."""
    if x.is_cuda:
        return moved_grouped_mlp_backward(grad, x, up, down, starts, ends, act)
    dx, dup, ddown = x.new_zeros(x.shape), torch.zeros_like(up), torch.zeros_like(down)
    for e, rows in _ranges(starts, ends):
        hidden = x[rows] @ up[e]
        ddown[e] = glu_packed_reference(hidden, None, act).t() @ grad[rows]
        dhidden = glu_packed_backward_reference(grad[rows] @ down[e].t(), hidden, act)
        dup[e] = x[rows].t() @ dhidden
        dx[rows] += dhidden @ up[e].t()
    return dx, dup, ddown


# -- with the library's grouped products


class _OwnRows:
    """The rows from starts[0] on, in front; ends counted from there. Nothing is read on the host."""

    def __init__(self, starts: Tensor, ends: Tensor, rows: int) -> None:
        first, at = starts[0], torch.arange(rows, device=starts.device)
        self.ends = (ends - first).clamp(min=0).cummax(0).values  # experts that are padding have no rows
        self.front = (at + first).clamp(max=rows - 1)
        self.back = at - first
        self.inside = (self.back >= 0) & (self.back < self.ends[-1])

    def forth(self, x: Tensor) -> Tensor:
        return x[self.front]

    def home(self, y: Tensor) -> Tensor:
        return torch.where(self.inside[:, None], y[self.back.clamp(min=0)], 0.0)


def moved_grouped_mlp(x: Tensor, up: Tensor, down: Tensor, starts: Tensor, ends: Tensor, act: str) -> Tensor:
    if not x.shape[0]:
        return x.new_zeros(0, down.shape[2])
    own = _OwnRows(starts, ends, x.shape[0])
    hidden = torch.ops.megafx.glu_packed(grouped_mm(own.forth(x), up, own.ends), None, act)
    return own.home(grouped_mm(hidden, down, own.ends))


def moved_grouped_mlp_backward(
    grad: Tensor, x: Tensor, up: Tensor, down: Tensor, starts: Tensor, ends: Tensor, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    if not x.shape[0]:
        return torch.zeros_like(x), torch.zeros_like(up), torch.zeros_like(down)
    own = _OwnRows(starts, ends, x.shape[0])
    x, grad = own.forth(x), own.forth(grad)
    hidden = grouped_mm(x, up, own.ends)
    ddown = grouped_mm_weight(torch.ops.megafx.glu_packed(hidden, None, act), grad, own.ends)
    dhidden = torch.ops.megafx.glu_packed_backward(grouped_mm(grad, down.transpose(1, 2), own.ends), hidden, act)
    dx = own.home(grouped_mm(dhidden, up.transpose(1, 2), own.ends))
    return dx, grouped_mm_weight(x, dhidden, own.ends), ddown


define_op(
    "grouped_mlp(Tensor x, Tensor up, Tensor down, Tensor starts, Tensor ends, str act) -> Tensor",
    rule="lin[2]: s! k!, e k! n!, e f! m, ~e, ~e -> s! m",
    reference=grouped_mlp,
    fake=lambda x, up, down, starts, ends, act: x.new_empty(x.shape[0], down.shape[2]),
)
define_op(
    "grouped_mlp_backward(Tensor grad, Tensor x, Tensor up, Tensor down, Tensor starts, Tensor ends, str act)"
    " -> (Tensor, Tensor, Tensor)",
    rule=None,
    reference=grouped_mlp_backward,
    fake=lambda grad, x, up, down, starts, ends, act: (
        x.new_empty(x.shape),
        up.new_empty(up.shape),
        down.new_empty(down.shape),
    ),
)


@family("megafx.grouped_mlp_backward")
def _backward_rule(call: Call) -> Row:
    text = "lin[0]: s! m, s! k!, e k! n!, e f! m, ~e, ~e -> s! k!; e k! n!; e f! m"
    return Row(text, partials=(((3,), "PPR"),))  # the gradient of `down` does not depend on it


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.act = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *torch.ops.megafx.grouped_mlp_backward(grad, *ctx.saved_tensors, ctx.act), None, None, None


define_gradient("grouped_mlp", _backward, _saves)
