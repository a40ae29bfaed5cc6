"""Key-value heads that ranks share: each rank takes those that its own query heads need.

    megafx::heads_of_rank            R -> S(-3)   x: [.., n, s, e] -> [.., local, s, e]
    megafx::heads_of_rank_gradient   S(-3) -> P   backward: what this rank adds to the gradients of the n heads

Query heads are cut over all ranks, wherever their groups end: 25 of them, five for each of 5 key-value heads, are 4 a rank on
8 ranks. Each key-value head is repeated `repeats` times, so that a rank's query heads come in groups of one size; `layout` is
the cut of the repeated heads, and a rank makes its own alone:

    query heads 0-3 | 4-7 | 8-11 | ..     rank 1 takes the key-value heads 0 1 1 1 (repeats 5), one for each query head
    query heads 0-3 | 4-7 | 8-11 | ..     of groups of 16: rank 1 takes head 0 (repeats 4), for all four

Pads hold the last head. Their gradients are zero, and are not added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import declare
from megafx.ops.axes import axis_rank
from megafx.ops.collectives import differentiate
from megafx.placements.types import Layout

aten = torch.ops.aten
Call = Callable[..., Any]  # (op, its arguments) -> its result: a tensor, or a node


def repeats_for(heads: int, kv_heads: int, t: int) -> int:
    """How often each key-value head is repeated, so that the query heads of every rank are whole groups.

    Where t does not divide the heads, each of them has its own: groups of more would be cut in the padding.
    """
    group = heads // kv_heads
    return group if heads % t else group // math.gcd(heads // t, group)


def take(call: Call, x: Any, repeats: int, layout: Layout, rank: int, t: int) -> Any:
    """x: [.., n, s, e] -> this rank's part of its heads, each repeated, cut by `layout`."""
    taken = _taken(repeats, layout, rank, t)
    taken += [taken[-1] if taken else 0] * (layout.local_size(t) - len(taken))
    starts = [i for i, head in enumerate(taken) if i == 0 or head != taken[i - 1] + 1]
    runs = zip(starts, [*starts[1:], len(taken)], strict=True)
    parts = [call(aten.slice.Tensor, x, -3, taken[a], taken[b - 1] + 1) for a, b in runs]
    return parts[0] if len(parts) == 1 else call(aten.cat.default, parts, -3)


def give_back(call: Call, grad: Any, repeats: int, layout: Layout, rank: int, t: int) -> Any:
    """grad: [.., local, s, e] -> [.., n, s, e]: the sum of each head's gradients on this rank, zeros for heads not taken."""
    taken, parts = _taken(repeats, layout, rank, t), []
    nothing = None
    for head in range(layout.size // repeats):
        if head in taken:
            first, count = taken.index(head), taken.count(head)
            part = call(aten.slice.Tensor, grad, -3, first, first + count)
            parts.append(part if count == 1 else call(aten.sum.dim_IntList, part, [-3], True))
        else:
            if nothing is None:
                nothing = call(aten.zeros_like.default, call(aten.slice.Tensor, grad, -3, 0, 1))
            parts.append(nothing)
    return parts[0] if len(parts) == 1 else call(aten.cat.default, parts, -3)


def _taken(repeats: int, layout: Layout, rank: int, t: int) -> list[int]:
    """The key-value head behind each of a rank's repeated heads, pads left out."""
    return [i // repeats for start, _, count in layout.pieces(rank, t) for i in range(start, start + count)]


def _define(name: str, compute: Callable[..., Any], types: str, size: Callable[[Layout, int, int], int]) -> Any:
    """megafx::name(x, repeats, layout, axis, t). size: (layout, repeats, t) -> the result's heads."""

    def run(x: Tensor, repeats: int, layout: Sequence[int], axis: str, t: int) -> Tensor:
        found = compute(_call, x, repeats, Layout.from_flat(layout), axis_rank(axis), t)
        return found.clone(memory_format=torch.contiguous_format)

    def fake(x: Tensor, repeats: int, layout: Sequence[int], axis: str, t: int) -> Tensor:
        return x.new_empty([*x.shape[:-3], size(Layout.from_flat(layout), repeats, t), *x.shape[-2:]])

    declare(f"megafx.{name}.default", types=types, outer="lin: ... h! s d -> ... g! s d")
    made = torch.library.custom_op(f"megafx::{name}", run, mutates_args=())
    made.register_fake(fake)
    return made


def _call(target: Any, *args: Any) -> Any:
    return target(*args)


_heads_of_rank = _define("heads_of_rank", take, "R -> S-3", lambda layout, repeats, t: layout.local_size(t))
_define("heads_of_rank_gradient", give_back, "S-3 -> P", lambda layout, repeats, t: layout.size // repeats)
differentiate(_heads_of_rank, lambda grad, _, *rest: torch.ops.megafx.heads_of_rank_gradient(grad, *rest))

HEADS_OF_RANK = torch.ops.megafx.heads_of_rank.default
HEADS_OF_RANK_GRADIENT = torch.ops.megafx.heads_of_rank_gradient.default
