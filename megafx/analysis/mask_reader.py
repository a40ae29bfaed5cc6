"""Reads from the ops that make a mask what the mask is.

    MaskReader(program).value_of(node) -> Value of mask_algebra.py

Everything is exact: the result of an op that is not understood is a Leaf. Numbers that are not in the graph but in buffers
(nanoGPT's tril) are read from the model, by `Program.table`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from megafx.analysis.mask_algebra import (
    TRUE,
    Choice,
    Index,
    Leaf,
    Value,
    at_most_zero,
    both,
    chosen,
    combined,
    condition_of,
    cut,
    either,
    index_of,
    moved,
    negated,
    number_of,
    truth,
)
from megafx.analysis.tables import Band
from megafx.ir.nodes import argument, aten_ops, op_name
from megafx.ir.program import VAL, Program


class MaskReader:
    """Reads values of one program; memo by node."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.memo: dict[fx.Node, Value] = {}
        self.inputs = dict(program.input_nodes())
        self.used: set[str] = set()  # buffers whose numbers were read

    def value_of(self, node: fx.Node) -> Value:
        if node not in self.memo:
            found = None
            if isinstance(node.meta.get(VAL), torch.Tensor):
                step = _input if node.op == "placeholder" else _STEPS.get(node.target)
                found = None if step is None else step(self, node)
            self.memo[node] = Leaf(node, _own_dims(node)) if found is None else found
        return self.memo[node]

    def operand(self, value: Any) -> Value | None:
        """A node's value, or a number as a constant."""
        if isinstance(value, fx.Node):
            return self.value_of(value) if isinstance(value.meta.get(VAL), torch.Tensor) else None
        if isinstance(value, (bool, int, float)):
            return Choice(TRUE, value, value)
        return None


def _size(value: Any) -> int | None:
    """A size argument that is a plain integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _own_dims(node: fx.Node) -> tuple[int | None, ...]:
    value = node.meta.get(VAL)
    if not isinstance(value, torch.Tensor):
        return ()
    n = value.dim()
    return tuple(None if isinstance(s, int) and s == 1 else i - n for i, s in enumerate(value.shape))


# -- ops, by what they do

Step = Callable[[MaskReader, fx.Node], Value | None]
_STEPS: dict[Any, Step] = {}


def _reads(names: str) -> Callable[[Step], Step]:
    """A decorator: the function reads ATen's ops of these names."""

    def register(step: Step) -> Step:
        _STEPS.update(dict.fromkeys(aten_ops(names), step))
        return step

    return register


def _input(reader: MaskReader, node: fx.Node) -> Value | None:
    program, spec = reader.program, reader.inputs[node]
    if spec.kind == "constant" and node.meta[VAL].dim() == 0:
        number = program.constants[spec.name].item()
        return Choice(TRUE, number, number)
    if spec.kind != "buffer" or any(o.kind == "mutation" and o.name == spec.name for o in program.outputs):
        return None
    table = program.table(spec.name)
    if table is None:
        return None
    reader.used.add(spec.name)
    if not isinstance(table, Band):
        return Choice(TRUE, table, table)
    where = at_most_zero(Index(((-2, -1), (-1, 1)), 0))
    if table.window:
        where = both(where, at_most_zero(Index(((-2, 1), (-1, -1)), 1 - table.window)))
    return Choice(where, table.on, table.off)


@_reads("arange arange.start arange.start_step")
def _arange(reader: MaskReader, node: fx.Node) -> Value | None:
    start = _size(argument(node, "start", 0))
    if start is None or argument(node, "step", 1) != 1 or node.meta[VAL].is_floating_point():
        return None
    return Index(((-1, 1),), start)


_FILLS = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}


@_reads("zeros new_zeros zeros_like ones new_ones ones_like full new_full full_like scalar_tensor")
def _filled(reader: MaskReader, node: fx.Node) -> Value | None:
    name = op_name(node)
    value = _FILLS.get(name)
    if value is None:
        value = number_of(reader.operand(argument(node, "s" if name == "scalar_tensor" else "fill_value")))
    if value is None:
        return None
    constant: Any = bool(value) if node.meta[VAL].dtype == torch.bool else value
    return Choice(TRUE, constant, constant)


@_reads("to.dtype")
def _cast(reader: MaskReader, node: fx.Node) -> Value | None:
    value = reader.operand(node.args[0])
    dtype = node.meta[VAL].dtype
    if isinstance(value, Choice):
        kind: Any = bool if dtype == torch.bool else float if dtype.is_floating_point else int
        try:
            return Choice(value.where, kind(value.on), kind(value.off))
        except (ValueError, OverflowError):
            return None
    whole = not (dtype.is_floating_point or dtype == torch.bool)
    same = isinstance(value, Leaf) and value.node.meta[VAL].dtype == dtype
    return value if same or (isinstance(value, Index) and whole) else None


@_reads("clone alias detach lift_fresh_copy")
def _same(reader: MaskReader, node: fx.Node) -> Value | None:
    return reader.operand(node.args[0])


@_reads(
    "le.Tensor le.Scalar lt.Tensor lt.Scalar ge.Tensor ge.Scalar gt.Tensor gt.Scalar eq.Tensor eq.Scalar ne.Tensor ne.Scalar"
)
def _compare(reader: MaskReader, node: fx.Node) -> Value | None:
    by, a, b = op_name(node), reader.operand(node.args[0]), reader.operand(node.args[1])
    number = number_of(b)
    if isinstance(a, Choice) and number is not None:
        on, off = (getattr(operator, by)(x, number) for x in (a.on, a.off))
        return truth(a.where if on else negated(a.where)) if on != off else Choice(TRUE, on, on)
    x, y = index_of(a), index_of(b)
    if x is None or y is None:
        return None
    less, one = x.plus(y, -1), Index((), 1)
    wanted = {"le": less, "lt": less.plus(one), "ge": less.times(-1), "gt": less.times(-1).plus(one)}
    return truth(at_most_zero(wanted[by])) if by in wanted else None


@_reads("bitwise_and.Tensor logical_and __and__.Tensor bitwise_or.Tensor logical_or __or__.Tensor")
def _logical(reader: MaskReader, node: fx.Node) -> Value | None:
    a, b = (condition_of(reader.operand(x)) for x in node.args[:2])
    combine = both if "and" in op_name(node) else either
    return None if a is None or b is None else truth(combine(a, b))


@_reads("logical_not bitwise_not")
def _not(reader: MaskReader, node: fx.Node) -> Value | None:
    c = condition_of(reader.operand(node.args[0]))
    return None if c is None else truth(negated(c))


@_reads("where.self where.ScalarOther where.ScalarSelf where.Scalar")
def _where(reader: MaskReader, node: fx.Node) -> Value | None:
    c = condition_of(reader.operand(node.args[0]))
    return None if c is None else chosen(c, reader.operand(node.args[1]), reader.operand(node.args[2]))


@_reads("masked_fill.Scalar masked_fill.Tensor")
def _masked_fill(reader: MaskReader, node: fx.Node) -> Value | None:
    c = condition_of(reader.operand(node.args[1]))
    return None if c is None else chosen(negated(c), reader.operand(node.args[0]), reader.operand(node.args[2]))


@_reads("add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar rsub.Scalar neg")
def _arithmetic(reader: MaskReader, node: fx.Node) -> Value | None:
    if argument(node, "alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
        return None
    name = op_name(node)
    a, b = reader.operand(node.args[0]), reader.operand(-1 if name == "neg" else node.args[1])
    a, b = (b, a) if name == "rsub" else (a, b)
    by = {"neg": "mul", "rsub": "sub", "div": "truediv"}.get(name, name)
    x, y = index_of(a), index_of(b)
    if x is not None and y is not None and (x.terms or y.terms):
        if by in ("add", "sub"):
            return x.plus(y, 1 if by == "add" else -1)
        if by == "mul" and not (x.terms and y.terms):
            return x.times(y.constant) if x.terms else y.times(x.constant)
        return None
    return combined(getattr(operator, by), by, a, b)


@_reads("tril triu")
def _triangle(reader: MaskReader, node: fx.Node) -> Value | None:
    value, k = reader.operand(node.args[0]), argument(node, "diagonal")
    if not isinstance(value, Choice) or _size(k) is None:
        return None
    x = Index(((-2, -1), (-1, 1)), -k)  # column - row - k
    zero: Any = False if isinstance(value.on, bool) else 0
    inside = at_most_zero(x if op_name(node) == "tril" else x.times(-1))
    if value.where == TRUE:
        return Choice(inside, value.on, zero)
    return Choice(both(inside, value.where), value.on, zero) if value.off == zero else None


# -- views


@_reads("unsqueeze transpose.int permute expand")
def _view(reader: MaskReader, node: fx.Node) -> Value | None:
    n, name = node.meta[VAL].dim(), op_name(node)
    to: Callable[[int], int | None] = lambda d: d  # noqa: E731  expand
    if name == "unsqueeze":
        at = int(node.args[1]) % n - n  # type: ignore[arg-type]
        to = lambda d: d if d > at else d - 1  # noqa: E731
    elif name == "transpose":
        a, b = (int(x) % n - n for x in node.args[1:3])  # type: ignore[arg-type]
        to = lambda d: b if d == a else a if d == b else d  # noqa: E731
    elif name == "permute":
        order = [int(x) % n - n for x in node.args[1]]  # type: ignore[union-attr, arg-type]
        to = lambda d: order.index(d) - n  # noqa: E731
    return moved(reader.operand(node.args[0]), to)


@_reads("slice.Tensor")
def _slice(reader: MaskReader, node: fx.Node) -> Value | None:
    n = node.meta[VAL].dim()
    dim = int(argument(node, "dim")) % n - n
    start = _size(argument(node, "start") or 0)
    value = reader.operand(node.args[0])
    if start is None or start < 0 or argument(node, "step") != 1 or cut(value, dim):
        return None
    return moved(value, lambda d: d, {dim: start})


@_reads("select.int")
def _select(reader: MaskReader, node: fx.Node) -> Value | None:
    source = node.args[0].meta[VAL]  # type: ignore[union-attr]
    n = source.dim()
    dim = int(node.args[1]) % n - n  # type: ignore[arg-type]
    if source.shape[dim] != 1 or not isinstance(source.shape[dim], int):
        return None
    return moved(reader.operand(node.args[0]), lambda d: None if d == dim else d if d > dim else d + 1)


@_reads("reshape view")
def _reshape(reader: MaskReader, node: fx.Node) -> Value | None:
    """Dims of length 1 come and go."""
    sizes = reader.program.sizes
    before, after = sizes.shape(node.args[0].meta[VAL]), sizes.shape(node.meta[VAL])  # type: ignore[union-attr]
    old = [i - len(before) for i, s in enumerate(before) if s != 1]
    new = [i - len(after) for i, s in enumerate(after) if s != 1]
    if [before[i] for i in old] != [after[i] for i in new]:
        return None
    return moved(reader.operand(node.args[0]), dict(zip(old, new, strict=True)).get)


@_reads("index.Tensor")
def _index(reader: MaskReader, node: fx.Node) -> Value | None:
    """x[i, j] with i, j counting all positions of dims: x with its dims at those."""
    source, indices = node.args[:2]
    leaf = reader.operand(source)
    if not isinstance(leaf, Leaf) or leaf.dims != _own_dims(source):  # type: ignore[arg-type]
        return None
    sizes, shape = reader.program.sizes, source.meta[VAL].shape  # type: ignore[union-attr]
    if len(indices) != len(shape):  # type: ignore[arg-type]
        return None
    dims: list[int | None] = []
    for which, size in zip(indices, shape, strict=True):  # type: ignore[arg-type]
        position = index_of(reader.operand(which))
        if position is None or len(position.terms) != 1 or position.constant or position.terms[0][1] != 1:
            return None
        dim = position.terms[0][0]
        if sizes.of(node.meta[VAL].shape[dim]) != sizes.of(size):
            return None
        dims.append(dim)
    return Leaf(leaf.node, tuple(dims))
