"""The lookup in a table whose rows the ranks share out: a rank finds the rows that it holds, and zeros for other ids.

    megafx::embedding_of_rank            S0, R -> P   weight [rows, h], ids [..] of the whole table -> [.., h]
    megafx::embedding_of_rank_gradient   R, R -> S0   gradient [.., h], ids [..] -> gradient of this rank's rows [rows, h]

    index = ids - rank*rows        row = index where 0 <= index < rows, else the first or last row of the rank
    forward: weight[row], 0 where row is not index        backward: grad, 0 where row is not index, added up in `row`

`layout` cuts the table in one range a rank (rules/strategies.py proposes no other). The row padding_idx (-1: none) is read, but
gets no gradient. Source: Megatron-LM's vocab_parallel_embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megafx.ir.facts import declare
from megafx.ops.axes import axis_rank
from megafx.placements.types import Layout

aten = torch.ops.aten
Call = Callable[..., Any]  # (op, its arguments) -> its result: a tensor, or a node


def look_up(call: Call, weight: Any, ids: Any, padding_idx: int, layout: Layout, rank: int, t: int) -> Any:
    """weight: [rows, h] of this rank -> [.., h]."""
    row, other = _rows(call, ids, layout, rank, t)
    return _without(call, call(aten.embedding.default, weight, row), other)


def give_back(call: Call, grad: Any, ids: Any, padding_idx: int, layout: Layout, rank: int, t: int) -> Any:
    """grad: [.., h] -> [rows, h]."""
    row, other = _rows(call, ids, layout, rank, t)
    if padding_idx >= 0:
        other = call(aten.bitwise_or.Tensor, other, call(aten.eq.Scalar, ids, padding_idx))
    return call(
        aten.embedding_dense_backward.default, _without(call, grad, other), row, layout.local_size(t), -1, False
    )


def _rows(call: Call, ids: Any, layout: Layout, rank: int, t: int) -> tuple[Any, Any]:
    """(a row of this rank for each id, where that is not the id's)."""
    if not layout.simple():
        raise ValueError(f"a table that is looked up is cut in one range a rank, not by {layout}")
    rows = layout.local_size(t)
    index = call(aten.sub.Tensor, ids, rank * rows)
    row = call(aten.clamp.default, index, 0, rows - 1)
    return row, call(aten.ne.Tensor, row, index)


def _without(call: Call, x: Any, other: Any) -> Any:
    """x: [.., h], 0 where `other` [..] holds."""
    like = x.meta["val"] if isinstance(x, fx.Node) else x
    nothing = call(aten.scalar_tensor.default, 0, dtype=like.dtype, device=like.device)
    return call(aten.where.self, call(aten.unsqueeze.default, other, -1), nothing, x)


def _define(name: str, compute: Callable[..., Any], types: str, outer: str, fake: Callable[..., Tensor]) -> Any:
    """megafx::name(x, ids, padding_idx, layout, axis, t)."""

    def run(x: Tensor, ids: Tensor, padding_idx: int, layout: Sequence[int], axis: str, t: int) -> Tensor:
        made: Tensor = compute(_call, x, ids, padding_idx, Layout.from_flat(layout), axis_rank(axis), t)
        return made

    declare(f"megafx.{name}.default", types=types, outer=outer)
    made = torch.library.custom_op(f"megafx::{name}", run, mutates_args=())
    made.register_fake(fake)
    return made


def _call(target: Any, *args: Any, **options: Any) -> Any:
    return target(*args, **options)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[2:]
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.megafx.embedding_of_rank_gradient(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 5


_define(
    "embedding_of_rank", look_up, "S0, R -> P", "lin[0]: v! d, ~... -> ... d",
    lambda weight, ids, *_: weight.new_empty([*ids.shape, weight.shape[1]]),
).register_autograd(_backward, setup_context=_save)  # fmt: skip
_define(
    "embedding_of_rank_gradient", give_back, "R, R -> S0", "lin[0]: ... d, ~... -> v! d",
    lambda grad, ids, padding_idx, layout, axis, t: grad.new_empty(
        [Layout.from_flat(layout).local_size(t), grad.shape[-1]]
    ),
)  # fmt: skip

EMBEDDING_OF_RANK = torch.ops.megafx.embedding_of_rank.default
EMBEDDING_OF_RANK_GRADIENT = torch.ops.megafx.embedding_of_rank_gradient.default
