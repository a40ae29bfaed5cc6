"""Row-wise units as text: the ops between the two products of a mixture's experts, for an op to compute row by row.

    "v0 = add.Tensor(h0, e0); v1 = slice.Tensor(v0, 1, 0, None, 2); v2 = silu(v1); v3 = megafx.glu(v2, h1, 'gelu'); v3"

    h0, h1, ..  [S, N]     results of the first products
    e0, e1, ..  [S, ..]    what belongs to the expert of each row (biases)
    r0, r1, ..  [S, ..]    what belongs to the row itself
    v0, v1, ..             values in between; the last name is the result [S, F]

Every op computes each row from the same row of its operands, so that a unit can be given some of the rows. Text rather than a
graph, because operators take no graphs: it prints as it is in dumps, and is equal where units are. Operators are those of
aten and megafx.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import _C, Tensor, fx

Values = Mapping[str, Tensor]
Argument = Callable[[Values], Any]
_END = 2**63 - 1  # of slices that go to the end
_NUMBERS = {"inf": math.inf, "nan": math.nan}


@dataclass(frozen=True)
class UnitOp:
    """name = op(*args, **kwargs)."""

    name: str
    op: Any
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]


@dataclass(frozen=True)
class Unit:
    steps: tuple[UnitOp, ...]
    result: str

    def run(self, given: Values) -> Tensor:
        """given: h0, e0, r0, .. of the same rows."""
        values = dict(given)
        for step in self.steps:
            kwargs = {name: a(values) for name, a in step.kwargs.items()}
            values[step.name] = step.op(*(a(values) for a in step.args), **kwargs)
        return values[self.result]

    def differentiate(self, given: Values, grad: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The gradients of what is given. grad: the result -> its gradient."""
        leaves = {name: value.detach().requires_grad_() for name, value in given.items()}
        with _recording():
            result = self.run(leaves)
        found = torch.autograd.grad(result, [*leaves.values()], grad(result.detach()), allow_unused=True)
        return {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(leaves, found, strict=True)}


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Autograd records, also inside of an operator, which the dispatcher calls below autograd."""
    left_out = _C._dispatch_tls_local_exclude_set()
    for key in (_C.DispatchKey.AutogradFunctionality, _C.DispatchKey.AutogradOther, _C.DispatchKey.ADInplaceOrView):
        left_out = left_out.remove(key)
    with torch.enable_grad(), _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), left_out):
        yield


# -- text -> unit


@functools.cache
def read(text: str) -> Unit:
    *steps, last = ast.parse(text).body
    return Unit(tuple(_step(s) for s in steps), ast.unparse(last))


def _step(line: ast.stmt) -> UnitOp:
    if not isinstance(line, ast.Assign) or not isinstance(call := line.value, ast.Call):
        raise ValueError(f"'{ast.unparse(line)}' is no step of a row-wise unit")
    op = _operator(ast.unparse(call.func))
    kwargs = {str(k.arg): _argument(k.value) for k in call.keywords}
    return UnitOp(ast.unparse(line.targets[0]), op, tuple(_argument(a) for a in call.args), kwargs)


def _operator(name: str) -> Any:
    own, short = name.startswith("megafx."), name.removeprefix("megafx.")
    packet, _, overload = short.partition(".")
    found: Any = getattr(torch.ops.megafx if own else torch.ops.aten, packet, None)
    if found is None:
        raise ValueError(f"a row-wise unit takes operators of aten and megafx, not {name}")
    return getattr(found, overload or "default")


def _argument(node: ast.expr) -> Argument:
    if isinstance(node, ast.List):
        items = [_argument(a) for a in node.elts]
        return lambda values: [item(values) for item in items]
    if isinstance(node, ast.Name) and node.id not in _NUMBERS:
        return lambda values: values[node.id]
    constant = _constant(node)
    return lambda values: constant


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return _NUMBERS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_constant(node.operand)
    if isinstance(node, ast.Attribute) and isinstance(dtype := getattr(torch, node.attr), torch.dtype):
        return dtype
    return ast.literal_eval(node)


# -- nodes -> text


def write(
    nodes: Iterable[fx.Node],
    arguments: Callable[[fx.Node], tuple[list[Any], dict[str, Any]]],
    outside: Callable[[fx.Node, Any], str],
) -> str:
    """The unit that these nodes are, in their order; the last one is its result.

    arguments: (args, kwargs) of a node. outside: (node, an argument) -> the name of one that is neither one of the nodes nor
    has a text.
    """
    made: dict[fx.Node, str] = {}
    lines = []

    def text(node: fx.Node, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(text(node, a) for a in value)}]"
        if value == _END and isinstance(value, int):
            return "None"
        if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
            return repr(value)
        return made[value] if value in made else outside(node, value)

    for node in nodes:
        args, kwargs = arguments(node)
        given = [text(node, a) for a in args] + [f"{k}={text(node, a)}" for k, a in kwargs.items()]
        operator = str(node.target).removeprefix("aten.").removesuffix(".default")
        lines.append(f"v{len(made)} = {operator}({', '.join(given)})")
        made[node] = f"v{len(made)}"
    return "; ".join([*lines, *[*made.values()][-1:]])
