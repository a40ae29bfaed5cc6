"""megafx::length: a number that code reads from a tensor and uses as a size; check_sizes: what is assumed of such numbers.

    length(number integer [], size) -> int64 [n, 0], n the number          # n = lengths.max().item(); x[:, :n]
    repeats(counts [m], size) -> int64 [n]: counts[0] times 0, ...         # x.repeat_interleave(counts, 0)
    check_sizes(lengths, dims, sizes, relation, where, after) -> int64 [], an error unless the relation holds

`.item()` and `.tolist()` become `length` (passes/canonicalize/sizes.py). As with `rows` (kernels/nonzero.py) n is the size of a
result, named `size` among the sizes of the graph (ir/data_sizes.py), and the host waits for it, as in eager mode. The result
has no elements. A relation is one between numbers n0, n1, ... (sizes of `lengths` at `dims`) and sizes s0, s1, ...: "n0 + n1
== s0"; it has to see the numbers themselves, for elsewhere in the graph n0 + n1 is s0. after: a check that is made before.
"""

from __future__ import annotations

import ast
import functools
import re
from types import CodeType

import torch
from torch import Tensor

from megafx.errors import UsageError, UsageRuntimeError
from megafx.ir.data_sizes import size_named
from megafx.ir.facts import ids
from megafx.kernels.common.op import define_op

_NODES = (ast.Expression, ast.Compare, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Constant, ast.Load, ast.BoolOp)
_FUNCTIONS = {"min": min, "max": max}


def length(number: Tensor, size: str) -> Tensor:
    n = int(number)
    if n < 0:
        raise UsageRuntimeError(
            f"a number that is read from a tensor is {n}, and the graph computes with it as with a size",
            fix="keep a number that may be negative in a tensor, without `.item()`, `.tolist()` or `int()`",
        )
    return torch.empty((n, 0), dtype=torch.int64, device=number.device)


def repeats(counts: Tensor, size: str) -> Tensor:
    return torch.repeat_interleave(counts)


@functools.lru_cache(maxsize=1024)
def _compiled(relation: str) -> CodeType:
    """Arithmetic and comparisons alone, wherever the text comes from."""
    tree = ast.parse(relation, mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, (*_NODES, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)):
            raise UsageError(f"{relation!r} is no relation between sizes", fix="report it")
    return compile(tree, "<relation>", "eval")


def check_sizes(
    lengths: list[Tensor], dims: list[int], sizes: list[int], relation: str, where: str, after: Tensor | None
) -> Tensor:
    values = {f"n{i}": x.shape[d] for i, (x, d) in enumerate(zip(lengths, dims, strict=True))} | {
        f"s{i}": n for i, n in enumerate(sizes)
    }
    if not eval(_compiled(relation), {"__builtins__": {}, **_FUNCTIONS}, values):
        shown = re.sub(r"\b[ns]\d+\b", lambda name: str(values[name[0]]), relation)
        raise UsageRuntimeError(
            f"a number that is read from a tensor does not fit: {where}, and {shown} does not hold",
            fix="give the model numbers that fit the sizes of its inputs; eager mode fails on these, too, or broadcasts a size "
            "of 1",
        )
    return torch.zeros((), dtype=torch.int64, device=lengths[0].device)


def _fake_check(
    lengths: list[Tensor], dims: list[int], sizes: list[int], relation: str, where: str, after: Tensor | None
) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=lengths[0].device)


define_op(
    "length(Tensor number, str size) -> Tensor",
    rule="nl: ~ -> ~r! d!",
    samples=[(ids(5), "u0")],
    reference=length,
    fake=lambda number, size: torch.empty((size_named(number, size), 0), dtype=torch.int64, device=number.device),
)
define_op(
    "repeats(Tensor counts, str size) -> Tensor",
    rule="nl: ~m! -> ~n!",
    samples=[(ids(3, 6), "u0")],
    reference=repeats,
    fake=lambda counts, size: torch.empty(size_named(counts, size), dtype=torch.int64, device=counts.device),
)
define_op(  # without a rule: all ranks make the same check
    "check_sizes(Tensor[] lengths, int[] dims, SymInt[] sizes, str relation, str where, Tensor? after) -> Tensor",
    reference=check_sizes,
    fake=_fake_check,
)
