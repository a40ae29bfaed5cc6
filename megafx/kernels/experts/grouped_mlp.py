"""megafx::grouped_mlp: the MLPs of a mixture of experts in one op, which can be split by experts.

    x [S, K], starts, ends int [E], ups each [E, K, N], down [E, F, M], down_bias [E, M] or none,
    stacks each [E, ..], rows each [S, ..], unit -> y [S, M]

    y_s = unit(x_s ups_e, stacks_e, rows_s) down_e + down_bias_e    for rows s of expert e: starts[e] <= s < ends[e];
                                                                    rows of no expert are 0
    unit    what is computed of each row between the products (row_units.py): h0, h1, .. are x_s ups_e, e0, e1, .. the stacks
            of the row's expert (biases), r0, r1, .. the row's own values. Its result is a row [F]

passes/experts/join_experts.py puts the op in place of two grouped_mm and the ops between them, where experts are to be
split over ranks. Each rank then has the weights, the biases and the ranges of rows of its own experts, and the results are
summands. Apart, the ops could not be split so: the ops between the products are not linear (expert parallelism: Lepikhin et
al. 2020, 2006.16668).

The gradient computes the first products and the unit again: nothing of size [S, F] is kept. CUDA: the library's grouped
products (grouped_mm.py) on rows moved so that the rank's own come first; their ranges must follow one another, as sorted rows
have them. Else one MLP an expert, for which the ranges are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import MATMUL, ids, real
from megafx.kernels.common.op import define_op
from megafx.kernels.experts.grouped_mm import grouped_mm, grouped_mm_weight
from megafx.kernels.experts.row_units import read
from megafx.rules.families import OpCall, RuleText

Tensors = Sequence[Tensor]


def check_grouped_mlp(x: Tensor, starts: Tensor, ends: Tensor, ups: Tensors, down: Tensor, stacks: Tensors) -> None:
    shapes = ", ".join(str(tuple(a.shape)) for a in (x, *ups, down))
    if x.dim() != 2 or down.dim() != 3 or not ups or any(up.dim() != 3 or x.shape[1] != up.shape[1] for up in ups):
        raise ValueError(f"grouped_mlp needs x [S, K], ups [E, K, N] and down [E, F, M], got {shapes}")
    if any(down.shape[0] != a.shape[0] for a in (*ups, *stacks, starts, ends)):
        raise ValueError(
            f"grouped_mlp: weights of {', '.join(str(a.shape[0]) for a in (*ups, down, *stacks))} experts for "
            f"{starts.shape[0]} starts and {ends.shape[0]} ends"
        )


def _ranges(starts: Tensor, ends: Tensor) -> Iterator[tuple[int, slice]]:
    for e, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if start < end:
            yield e, slice(int(start), int(end))  # counts of histc are floating


def _named(hidden: Tensors, stacks: Tensors, rows: Tensors) -> dict[str, Tensor]:
    """The operands of the unit by name."""
    return {
        f"{kind}{i}": a for kind, all_ in zip("her", (hidden, stacks, rows), strict=True) for i, a in enumerate(all_)
    }


def _of(found: Mapping[str, Tensor], kind: str, like: Tensors) -> list[Tensor]:
    return [found[f"{kind}{i}"] for i in range(len(like))]


def grouped_mlp(
    x: Tensor, starts: Tensor, ends: Tensor, ups: Tensors, down: Tensor, down_bias: Tensor | None, stacks: Tensors,
    rows: Tensors, unit: str,
) -> Tensor:  # fmt: skip
    check_grouped_mlp(x, starts, ends, ups, down, stacks)
    if x.is_cuda:
        return moved_grouped_mlp(x, starts, ends, ups, down, down_bias, stacks, rows, unit)
    y = x.new_zeros(x.shape[0], down.shape[2])
    for e, s in _ranges(starts, ends):
        a = read(unit).run(_of_expert(e, s, x, ups, stacks, rows))
        y[s] += a @ down[e] if down_bias is None else a @ down[e] + down_bias[e]
    return y


def _of_expert(e: int, s: slice, x: Tensor, ups: Tensors, stacks: Tensors, rows: Tensors) -> dict[str, Tensor]:
    """What the unit is given for the rows of one expert."""
    own = [stack[e].expand(s.stop - s.start, *stack.shape[1:]) for stack in stacks]
    return _named([x[s] @ up[e] for up in ups], own, [row[s] for row in rows])


def grouped_mlp_backward(
    grad: Tensor, x: Tensor, starts: Tensor, ends: Tensor, ups: Tensors, down: Tensor, stacks: Tensors, rows: Tensors,
    unit: str, biased: bool,
) -> list[Tensor]:  # fmt: skip
    """-> gradients of x, of each of ups, of down, of each of stacks, of each of rows, of the bias if there is one."""
    if x.is_cuda:
        return moved_grouped_mlp_backward(grad, x, starts, ends, ups, down, stacks, rows, unit, biased)
    dx, *dups = (torch.zeros_like(a, memory_format=torch.contiguous_format) for a in (x, *ups))
    ddown, dbias = down.new_zeros(down.shape), down.new_zeros(down.shape[0], down.shape[2])
    dstacks, drows = ([a.new_zeros(a.shape) for a in each] for each in (stacks, rows))
    for e, s in _ranges(starts, ends):

        def through_down(a: Tensor, e: int = e, s: slice = s) -> Tensor:
            ddown[e] = a.t() @ grad[s]
            return grad[s] @ down[e].t()

        found = read(unit).differentiate(_of_expert(e, s, x, ups, stacks, rows), through_down)
        dbias[e] = grad[s].sum(0)
        for up, dup, dhidden in zip(ups, dups, _of(found, "h", ups), strict=True):
            dup[e] = x[s].t() @ dhidden
            dx[s] += dhidden @ up[e].t()
        for dstack, each in zip(dstacks, _of(found, "e", stacks), strict=True):
            dstack[e] = each.sum(0)
        for drow, each in zip(drows, _of(found, "r", rows), strict=True):
            drow[s] += each
    return [dx, *dups, ddown, *dstacks, *drows, *([dbias] if biased else [])]


# -- with the library's grouped products


class _OwnRows:
    """The rows from starts[0] on, in front; ends counted from there. Nothing is read on the host."""

    def __init__(self, starts: Tensor, ends: Tensor, rows: int) -> None:
        first, at = starts[0].long(), torch.arange(rows, device=starts.device)
        self.ends = (ends.long() - first).clamp(min=0).cummax(0).values  # experts that are padding have no rows
        self.front = (at + first).clamp(max=rows - 1)
        self.back = at - first
        self.inside = (self.back >= 0) & (self.back < self.ends[-1])
        self.last = at < self.ends[-1]
        self.expert = torch.searchsorted(self.ends, at, right=True).clamp(max=ends.shape[0] - 1)

    def forth(self, x: Tensor) -> Tensor:
        return x[self.front]

    def home(self, y: Tensor) -> Tensor:
        return self._where(self.inside, y[self.back.clamp(min=0)])

    def sums(self, x: Tensor) -> Tensor:
        """[S, ..] -> [E, ..], sums over the rows of each expert: a product, whose order is the same in every run."""
        member = self.expert == torch.arange(self.ends.shape[0], device=x.device)[:, None]
        return (member.to(x.dtype) @ self._where(self.last, x).flatten(1)).reshape(-1, *x.shape[1:])

    def _where(self, mask: Tensor, x: Tensor) -> Tensor:
        return torch.where(mask.reshape(-1, *[1] * (x.dim() - 1)), x, 0.0)

    def given(self, x: Tensor, ups: Tensors, stacks: Tensors, rows: Tensors) -> dict[str, Tensor]:
        """What the unit is given; x: moved."""
        hidden = [grouped_mm(x, up, self.ends) for up in ups]
        return _named(hidden, [a[self.expert] for a in stacks], [self.forth(a) for a in rows])


def moved_grouped_mlp(
    x: Tensor, starts: Tensor, ends: Tensor, ups: Tensors, down: Tensor, down_bias: Tensor | None, stacks: Tensors,
    rows: Tensors, unit: str,
) -> Tensor:  # fmt: skip
    if not x.shape[0]:
        return x.new_zeros(0, down.shape[2])
    own = _OwnRows(starts, ends, x.shape[0])
    a = read(unit).run(own.given(own.forth(x), ups, stacks, rows)).contiguous()
    y = grouped_mm(a, down, own.ends)
    return own.home(y if down_bias is None else y + down_bias[own.expert])


def moved_grouped_mlp_backward(
    grad: Tensor, x: Tensor, starts: Tensor, ends: Tensor, ups: Tensors, down: Tensor, stacks: Tensors, rows: Tensors,
    unit: str, biased: bool,
) -> list[Tensor]:  # fmt: skip
    if not x.shape[0]:
        empty = _fake_backward(grad, x, starts, ends, ups, down, stacks, rows, unit, biased)
        return [torch.zeros_like(a) for a in empty]
    own = _OwnRows(starts, ends, x.shape[0])
    x, grad = own.forth(x), own.forth(grad)
    ddown: list[Tensor] = []

    def through_down(a: Tensor) -> Tensor:
        ddown.append(grouped_mm_weight(a.contiguous(), grad, own.ends))
        return grouped_mm(grad, down.transpose(1, 2), own.ends)

    found = read(unit).differentiate(own.given(x, ups, stacks, rows), through_down)
    dhidden = [d.contiguous() for d in _of(found, "h", ups)]
    dx = [grouped_mm(d, up.transpose(1, 2), own.ends) for d, up in zip(dhidden, ups, strict=True)]
    dups = [grouped_mm_weight(x, d, own.ends) for d in dhidden]
    dstacks = [own.sums(d) for d in _of(found, "e", stacks)]
    drows = [own.home(d) for d in _of(found, "r", rows)]
    return [own.home(sum(dx[1:], dx[0])), *dups, *ddown, *dstacks, *drows, *([own.sums(grad)] if biased else [])]


# -- the op


def _fake_backward(
    grad: Tensor, x: Tensor, starts: Tensor, ends: Tensor, ups: Tensors, down: Tensor, stacks: Tensors, rows: Tensors,
    unit: str, biased: bool,
) -> list[Tensor]:  # fmt: skip
    made = [a.new_empty(a.shape) for a in (x, *ups, down, *stacks, *rows)]
    return [*made, down.new_empty(down.shape[0], down.shape[2])] if biased else made


def _dims(call: OpCall, row: str) -> tuple[list[str], list[str], list[str]]:
    """Dims of ups, stacks and rows; those inside of an expert or a row are the unit's own."""
    ups = [f"e k! n{i}!" for i in range(len(call.get("ups")))]
    inside = lambda a, of: " ".join(f"{of}{d}!" for d in range(1, len(a.shape)))
    stacks = [f"e {inside(a, f'a{i}_')}" for i, a in enumerate(call.get("stacks"))]
    return ups, stacks, [f"{row} {inside(a, f'b{i}_')}" for i, a in enumerate(call.get("rows"))]


def _text(call: OpCall, row: str) -> str:
    ups, stacks, rows = _dims(call, row)
    ends = "~e" if row == "s!" else "*"  # on outer axes each rank has those of the rows that it has grouped by itself
    operands = [f"{row} k!", ends, ends, *ups, "e f! m", "+e m", *stacks, *rows]
    return f"lin[{3 + len(ups)}]: {', '.join(operands)} -> {row} m"


def _rule(call: OpCall) -> RuleText:
    return RuleText(_text(call, "s!"), _WHY)


def _backward_text(call: OpCall, row: str) -> str:
    ups, stacks, rows = _dims(call, row)
    ends = "~e" if row == "s!" else "*"
    operands = [f"{row} m", f"{row} k!", ends, ends, *ups, "e f! m", *stacks, *rows]
    biased = ["e m"] if call.get("biased") else []
    results = [f"{row} k!", *ups, "e f! m", *stacks, *rows, *biased]
    return f"lin[0]: {', '.join(operands)} -> {'; '.join(results)}"


def _backward_rule(call: OpCall) -> RuleText:
    ups, stacks, rows = (len(call.get(name)) for name in ("ups", "stacks", "rows"))
    # all but the gradients of `down` and of its bias depend on `down`
    through = "P" * (1 + ups) + "R" + "P" * (stacks + rows) + "R" * bool(call.get("biased"))
    return RuleText(_backward_text(call, "s!"), _WHY, partials=(((4 + ups,), through),))


_WHY = {"s": "the ranges of rows are of all rows", "f": "what is between the products may mix its elements"}
_ENDS = (ids(4, 4), ids(7, 4))
_GATED = "v0 = megafx.glu_packed(h0, None, 'silu'); v0"
_BIASED = (
    "v0 = add.Tensor(h0, e0); v1 = megafx.glu(v0, h1, 'gelu'); v2 = softmax.int(v1, -1); v3 = add.Tensor(v2, r0); v3"
)

define_op(
    "grouped_mlp(Tensor x, Tensor starts, Tensor ends, Tensor[] ups, Tensor down, Tensor? down_bias, Tensor[] stacks, "
    "Tensor[] rows, str unit) -> Tensor",
    rule=_rule,
    outer=lambda call: _text(call, "s"),
    cost=MATMUL,
    # the last product's, and a share of the first ones'
    terms=lambda x, starts, ends, ups, down, *_: down[1] + sum(up[1] * up[2] for up in ups) // down[2],
    groups=4,
    experts="e",
    samples=[
        (real(6, 4), *_ENDS, [real(4, 4, 6)], real(4, 3, 2), None, [], [], _GATED),
        (real(6, 4), *_ENDS, [real(4, 4, 3)] * 2, real(4, 3, 2), real(4, 2), [real(4, 3)], [real(6, 1)], _BIASED),
    ],
    reference=grouped_mlp,
    fake=lambda x, starts, ends, ups, down, *rest: x.new_empty(x.shape[0], down.shape[2]),
)
define_op(
    "grouped_mlp_backward(Tensor grad, Tensor x, Tensor starts, Tensor ends, Tensor[] ups, Tensor down, Tensor[] stacks, "
    "Tensor[] rows, str unit, bool biased) -> Tensor[]",
    rule=_backward_rule,
    outer=lambda call: _backward_text(call, "s"),
    cost=MATMUL,
    # of x's gradient: the first products once more and both of their gradients, and the last one's two
    terms=lambda grad, x, starts, ends, ups, down, *_: 3 * sum(up[2] for up in ups) + 2 * down[1] * down[2] // x[1],
    groups=5,
    samples=[
        (real(6, 2), real(6, 4), *_ENDS, [real(4, 4, 3)] * 2, real(4, 3, 2), [real(4, 3)], [real(6, 1)], _BIASED, True),
        (real(6, 2), real(6, 4), *_ENDS, [real(4, 4, 6)], real(4, 3, 2), [], [], _GATED, False),
    ],
    reference=grouped_mlp_backward,
    fake=_fake_backward,
)


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, starts, ends, ups, down, down_bias, stacks, rows, ctx.unit = inputs
    ctx.counts = len(ups), len(stacks), len(rows)
    ctx.biased = down_bias is not None
    ctx.save_for_backward(x, starts, ends, down, *ups, *stacks, *rows)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, starts, ends, down, *lists = ctx.saved_tensors
    ups, stacks, rows = _split(lists, ctx.counts)
    op = torch.ops.megafx.grouped_mlp_backward
    dx, *found = op(grad, x, starts, ends, ups, down, stacks, rows, ctx.unit, ctx.biased)
    dups, (ddown,), dstacks, drows, dbias = _split(found, (ctx.counts[0], 1, *ctx.counts[1:], int(ctx.biased)))
    return dx, None, None, dups, ddown, dbias[0] if dbias else None, dstacks, drows, None


def _split(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    given = iter(values)
    return [[next(given) for _ in range(n)] for n in counts]


# define_gradient is for operands that are no lists
torch.library.register_autograd("megafx::grouped_mlp", _backward, setup_context=_saves)
