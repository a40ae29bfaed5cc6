"""Write statistics over the dim that an axis cuts as means, sums and elementwise ops, which then are those of all ranks.

Before:  %y = batch_norm(%x, ...);  %v = var(%x, [0], correction=1);  %a = any(%x)
After:   %m = mean(%x, [0, 2], True); %d = sub(%x, %m); %s = mean(mul(%d, %d), [0, 2], True); %y = mul(%d, rsqrt(add(%s, eps)))
         ...;  %a = ne(sum(ne(%x, 0)), 0)
Legal because: these are the definitions. `place_axes` calls it for each axis: what it leaves, the sharding rules can cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import argument, aten_ops, op_name, replace
from megafx.ir.program import VAL, Builder, Program
from megafx.ir.sizes import SizeEmitter

NAME = "place_axes"
aten = torch.ops.aten


def spell_out_statistics(program: Program, over_rows: Callable[[fx.Node, Any], bool]) -> int:
    """Write out batch norms, and variances, deviations, norms and counts over the cut dim; returns their number.

    over_rows(value, dims): True if the dim that is cut is among these.
    """
    sizes = SizeEmitter(program.graph, program.sizes)
    changes = 0
    for node in [n for n in program.graph.nodes if n.op == "call_function"]:
        build = Builder(program, node, node, NAME)
        if node.target is aten.batch_norm.default:
            made = _batch_norm(build, node)
        elif node.target not in _SPELLED_OUT or not over_rows(node.args[0], _dims(node)):
            continue
        elif node.target in _COUNTS:
            made = _count(build, node)
        elif node.target is aten.linalg_vector_norm.default:
            if argument(node, "ord") != 2:
                continue
            made = _norm(build, node)
        else:
            made = _variance(build, node, sizes)
            if node.target in _DEVIATIONS:
                made = _root(build, made)
        replace(node, made)
        changes += 1
    return changes


_DEVIATIONS = (aten.std.correction, aten.std.dim, aten.std.default)
_COUNTS = aten_ops(
    "any.default any.dim any.dims all.default all.dim all.dims count_nonzero.default count_nonzero.dim_IntList"
)
_SPELLED_OUT = (
    *_COUNTS,
    *(aten.var.correction, aten.var.dim, aten.var.default, aten.linalg_vector_norm.default),
    *_DEVIATIONS,
)


def _dims(node: fx.Node) -> Any:
    """The dims that it reduces; None and [] are all."""
    dims = argument(node, "dim")
    return [dims] if isinstance(dims, int) else dims


def _count(build: Builder, node: fx.Node) -> fx.Node:
    """any, all and count_nonzero by how many elements are zero, or are not."""
    x, name = argument(node, "self"), op_name(node)
    counted = build(aten.eq.Scalar if name == "all" else aten.ne.Scalar, x, 0)
    dims = _dims(node) or [*range(x.meta[VAL].dim())]
    total = build(aten.sum.dim_IntList, counted, dims, bool(argument(node, "keepdim")))
    if name == "count_nonzero":
        return total
    made = build(aten.eq.Scalar if name == "all" else aten.ne.Scalar, total, 0)
    dtype = node.meta[VAL].dtype
    return made if made.meta[VAL].dtype == dtype else build(aten.to.dtype, made, dtype)


def _root(build: Builder, square: fx.Node) -> fx.Node:
    """sqrt, whose gradient is 0 at 0, as that of a norm or a deviation is. (NaN stays NaN.)"""
    nonzero = build(aten.ne.Scalar, square, 0)
    root = build(aten.sqrt.default, build(aten.where.ScalarOther, nonzero, square, 1))
    return build(aten.where.ScalarOther, nonzero, root, 0)


def _norm(build: Builder, node: fx.Node) -> fx.Node:
    x, dims, keep, dtype = (argument(node, name) for name in ("self", "dim", "keepdim", "dtype"))
    x = x if dtype is None else build(aten.to.dtype, x, dtype)
    value = x.meta[VAL]
    short = value.dtype in (torch.bfloat16, torch.float16)
    y = build(aten.to.dtype, x, torch.float32) if short else x
    every = [*range(value.dim())]
    total = build(aten.sum.dim_IntList, build(aten.mul.Tensor, y, y), dims or every, keep)
    root = _root(build, total)
    return build(aten.to.dtype, root, value.dtype) if short else root


def _batch_norm(build: Builder, node: fx.Node) -> fx.Node:
    x, weight, bias, eps = (argument(node, name) for name in ("input", "weight", "bias", "eps"))
    value, per_channel = x.meta[VAL], [1, x.meta[VAL].shape[1], *([1] * (x.meta[VAL].dim() - 2))]
    dims = [d for d in range(value.dim()) if d != 1]
    short = value.dtype in (torch.bfloat16, torch.float16)
    y = build(aten.to.dtype, x, torch.float32) if short else x
    if argument(node, "training"):
        y = build(aten.sub.Tensor, y, build(aten.mean.dim, y, dims, True))
        variance = build(aten.mean.dim, build(aten.mul.Tensor, y, y), dims, True)
    else:
        mean, variance = (
            build(aten.reshape.default, argument(node, f"running_{name}"), per_channel) for name in ("mean", "var")
        )
        y = build(aten.sub.Tensor, y, mean)
    y = build(aten.mul.Tensor, y, build(aten.rsqrt.default, build(aten.add.Tensor, variance, eps)))
    for op, operand in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        y = y if operand is None else build(op, y, build(aten.reshape.default, operand, per_channel))
    return build(aten.to.dtype, y, value.dtype) if short else y


def _variance(build: Builder, node: fx.Node, sizes: SizeEmitter) -> fx.Node:
    x, dims, keep = (argument(node, name) for name in ("self", "dim", "keepdim"))
    shape, correction, unbiased = x.meta[VAL].shape, argument(node, "correction"), argument(node, "unbiased")
    correction = correction if unbiased is None else int(unbiased)
    dims = [d % len(shape) for d in dims] if dims else [*range(len(shape))]
    off = build(aten.sub.Tensor, x, build(aten.mean.dim, x, dims, True))
    biased = build(aten.mean.dim, build(aten.mul.Tensor, off, off), dims, keep)
    count = sizes(build.program.sizes.of(math.prod(shape[d] for d in dims)))  # `_count_all` counts those of all ranks
    left = sizes(build.program.sizes.of(math.prod(shape[d] for d in dims) - (1 if correction is None else correction)))
    return build(aten.div.Tensor, build(aten.mul.Tensor, biased, count), left)
