"""What a mask that a graph computes is, read from the ops that make it.

    MaskReader(program).value_of(node) -> Value of mask_algebra.py

Everything is exact: an op that is not understood makes a Leaf of its result. Numbers that are not in the graph but in buffers
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
    Cond,
    Index,
    Leaf,
    Sum,
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
from megafx.ir.nodes import argument, op_name
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
            found = self._read(node)
            self.memo[node] = Leaf(node, _own_dims(node)) if found is None else found
        return self.memo[node]

    def _read(self, node: fx.Node) -> Value | None:
        if not isinstance(node.meta.get(VAL), torch.Tensor):
            return None
        if node.op == "placeholder":
            return self._input(node)
        step = _STEPS.get(str(node.target)) if node.op == "call_function" else None
        return None if step is None else step(self, node)

    def _input(self, node: fx.Node) -> Value | None:
        spec, value = self.inputs[node], node.meta[VAL]
        if spec.kind == "constant" and value.dim() == 0:
            return Choice(TRUE, (number := self.program.constants[spec.name].item()), number)
        if spec.kind != "buffer" or spec.name in self._mutated():
            return None
        table = self.program.table(spec.name)
        if isinstance(table, Band):
            where = at_most_zero(Index(((-2, -1), (-1, 1)), 0))
            if table.window:
                where = both(where, at_most_zero(Index(((-2, 1), (-1, -1)), 1 - table.window)))
            self.used.add(spec.name)
            return Choice(where, table.on, table.off)
        if table is not None:
            self.used.add(spec.name)
            return Choice(TRUE, table, table)
        return None

    def _mutated(self) -> set[str]:
        return {o.name for o in self.program.outputs if o.kind == "mutation"}

    # -- arguments

    def operand(self, value: Any) -> Value | None:
        """A node's value, or a number as a constant."""
        if isinstance(value, fx.Node):
            return self.value_of(value) if isinstance(value.meta.get(VAL), torch.Tensor) else None
        if isinstance(value, (bool, int, float)):
            return Choice(TRUE, value, value)
        return None

    def size(self, value: Any) -> int | None:
        """A size argument that is a plain integer."""
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def _own_dims(node: fx.Node) -> tuple[int | None, ...]:
    value = node.meta.get(VAL)
    if not isinstance(value, torch.Tensor):
        return ()
    n = value.dim()
    return tuple(None if isinstance(s, int) and s == 1 else i - n for i, s in enumerate(value.shape))


# -- ops, by what they do

Step = Callable[[MaskReader, fx.Node], "Value | None"]


def _arange(reader: MaskReader, node: fx.Node) -> Value | None:
    which = str(node.target).rpartition(".")[2]
    start = 0 if which == "default" else reader.size(node.args[0])
    step = reader.size(argument(node, "step", 1)) if which == "start_step" else 1
    if start is None or step != 1 or node.meta[VAL].is_floating_point():
        return None
    return Index(((-1, 1),), start)


def _filled(number: float | None) -> Step:
    def step(reader: MaskReader, node: fx.Node) -> Value | None:
        value = number
        if value is None:
            given = argument(node, "s" if op_name(node) == "scalar_tensor" else "fill_value")
            value = number_of(reader.operand(given))
        if value is None:
            return None
        constant: Any = bool(value) if node.meta[VAL].dtype == torch.bool else value
        return Choice(TRUE, constant, constant)

    return step


def _cast(reader: MaskReader, node: fx.Node) -> Value | None:
    value = reader.operand(node.args[0])
    dtype = node.meta[VAL].dtype
    if isinstance(value, Choice):
        kind: Any = bool if dtype == torch.bool else float if dtype.is_floating_point else int
        try:
            return Choice(value.where, kind(value.on), kind(value.off))
        except (ValueError, OverflowError):
            return None
    if isinstance(value, Index) and not (dtype.is_floating_point or dtype == torch.bool):
        return value
    if isinstance(value, Sum) and dtype.is_floating_point:
        return None
    if isinstance(value, Leaf) and value.node.meta[VAL].dtype == dtype:
        return value
    return None


def _same(reader: MaskReader, node: fx.Node) -> Value | None:
    return reader.operand(node.args[0])


def _compare(by: str) -> Step:
    op: Callable[[Any, Any], bool] = getattr(operator, by)

    def step(reader: MaskReader, node: fx.Node) -> Value | None:
        a, b = reader.operand(node.args[0]), reader.operand(node.args[1])
        number = number_of(b)
        if isinstance(a, Choice) and number is not None:
            on, off = op(a.on, number), op(a.off, number)
            return truth(a.where if on else negated(a.where)) if on != off else Choice(TRUE, on, on)
        x, y = index_of(a), index_of(b)
        if x is None or y is None:
            return None
        less, one = x.plus(y, -1), Index((), 1)
        found = {
            "le": less, "lt": less.plus(one), "ge": less.times(-1), "gt": less.times(-1).plus(one),
        }.get(by)  # fmt: skip
        return None if found is None else truth(at_most_zero(found))

    return step


def _logical(combine: Callable[[Cond, Cond], Cond]) -> Step:
    def step(reader: MaskReader, node: fx.Node) -> Value | None:
        a, b = (condition_of(reader.operand(x)) for x in node.args[:2])
        return None if a is None or b is None else truth(combine(a, b))

    return step


def _not(reader: MaskReader, node: fx.Node) -> Value | None:
    c = condition_of(reader.operand(node.args[0]))
    return None if c is None else truth(negated(c))


def _where(reader: MaskReader, node: fx.Node) -> Value | None:
    c = condition_of(reader.operand(node.args[0]))
    return None if c is None else chosen(c, reader.operand(node.args[1]), reader.operand(node.args[2]))


def _masked_fill(reader: MaskReader, node: fx.Node) -> Value | None:
    c = condition_of(reader.operand(node.args[1]))
    if c is None:
        return None
    return chosen(negated(c), reader.operand(node.args[0]), reader.operand(node.args[2]))


def _arithmetic(by: str, reverse: bool = False) -> Step:
    op: Callable[[Any, Any], Any] = getattr(operator, by)

    def step(reader: MaskReader, node: fx.Node) -> Value | None:
        if argument(node, "alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
            return None
        a, b = reader.operand(node.args[0]), reader.operand(node.args[1])
        a, b = (b, a) if reverse else (a, b)
        x, y = index_of(a), index_of(b)
        if x is not None and y is not None and (x.terms or y.terms):
            if by in ("add", "sub"):
                return x.plus(y, 1 if by == "add" else -1)
            if by == "mul" and not (x.terms and y.terms):
                return x.times(y.constant) if x.terms else y.times(x.constant)
            return None
        return combined(op, by, a, b)

    return step


def _triangle(lower: bool) -> Step:
    def step(reader: MaskReader, node: fx.Node) -> Value | None:
        value, k = reader.operand(node.args[0]), argument(node, "diagonal")
        if not isinstance(value, Choice) or reader.size(k) is None:
            return None
        x = Index(((-2, -1), (-1, 1)), -k)  # column - row - k
        zero: Any = False if isinstance(value.on, bool) else 0
        inside = at_most_zero(x if lower else x.times(-1))
        if value.where == TRUE:
            return Choice(inside, value.on, zero)
        return Choice(both(inside, value.where), value.on, zero) if value.off == zero else None

    return step


# -- views


def _unsqueeze(reader: MaskReader, node: fx.Node) -> Value | None:
    n = node.meta[VAL].dim()
    at = int(node.args[1]) % n - n  # type: ignore[arg-type]
    return moved(reader.operand(node.args[0]), lambda d: d if d > at else d - 1)


def _transpose(reader: MaskReader, node: fx.Node) -> Value | None:
    n = node.meta[VAL].dim()
    a, b = (int(x) % n - n for x in node.args[1:3])  # type: ignore[arg-type]
    return moved(reader.operand(node.args[0]), lambda d: b if d == a else a if d == b else d)


def _permute(reader: MaskReader, node: fx.Node) -> Value | None:
    n = node.meta[VAL].dim()
    order = [int(x) % n - n for x in node.args[1]]  # type: ignore[union-attr, arg-type]
    return moved(reader.operand(node.args[0]), lambda d: order.index(d) - n)


def _expand(reader: MaskReader, node: fx.Node) -> Value | None:
    return moved(reader.operand(node.args[0]), lambda d: d)


def _slice(reader: MaskReader, node: fx.Node) -> Value | None:
    n = node.meta[VAL].dim()
    dim = int(argument(node, "dim")) % n - n
    start = reader.size(argument(node, "start") or 0)
    if start is None or start < 0 or argument(node, "step") != 1:
        return None
    value = reader.operand(node.args[0])
    if cut(value, dim):
        return None
    return moved(value, lambda d: d, {dim: start})


def _select(reader: MaskReader, node: fx.Node) -> Value | None:
    source = node.args[0].meta[VAL]  # type: ignore[union-attr]
    n = source.dim()
    dim = int(node.args[1]) % n - n  # type: ignore[arg-type]
    if source.shape[dim] != 1 or not isinstance(source.shape[dim], int):
        return None
    return moved(reader.operand(node.args[0]), lambda d: None if d == dim else d if d > dim else d + 1)


def _reshape(reader: MaskReader, node: fx.Node) -> Value | None:
    """Dims of length 1 come and go."""
    sizes = reader.program.sizes
    before, after = sizes.shape(node.args[0].meta[VAL]), sizes.shape(node.meta[VAL])  # type: ignore[union-attr]
    old = [i - len(before) for i, s in enumerate(before) if s != 1]
    new = [i - len(after) for i, s in enumerate(after) if s != 1]
    if [before[i] for i in old] != [after[i] for i in new]:
        return None
    return moved(reader.operand(node.args[0]), dict(zip(old, new, strict=True)).get)


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


def _table() -> dict[str, Step]:
    steps: dict[str, Step] = {
        **dict.fromkeys(("arange.default", "arange.start", "arange.start_step"), _arange),
        **dict.fromkeys(("zeros.default", "new_zeros.default", "zeros_like.default"), _filled(0)),
        **dict.fromkeys(("ones.default", "new_ones.default", "ones_like.default"), _filled(1)),
        **dict.fromkeys(("clone.default", "alias.default", "detach.default", "lift_fresh_copy.default"), _same),
        **dict.fromkeys(("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar"), _where),
        **dict.fromkeys(("masked_fill.Scalar", "masked_fill.Tensor"), _masked_fill),
        **dict.fromkeys(("logical_not.default", "bitwise_not.default"), _not),
        "to.dtype": _cast,
        "expand.default": _expand,
        "unsqueeze.default": _unsqueeze,
        "transpose.int": _transpose,
        "permute.default": _permute,
        "slice.Tensor": _slice,
        "select.int": _select,
        "reshape.default": _reshape,
        "view.default": _reshape,
        "index.Tensor": _index,
        "tril.default": _triangle(True),
        "triu.default": _triangle(False),
        "neg.default": lambda reader, node: combined(operator.mul, "mul", reader.operand(node.args[0]), Choice(TRUE, -1, -1)),
        "rsub.Scalar": _arithmetic("sub", reverse=True),
    }  # fmt: skip
    for name in ("full", "new_full", "full_like", "scalar_tensor"):
        steps[f"{name}.default"] = _filled(None)
    for by in ("le", "lt", "ge", "gt", "eq", "ne"):
        steps |= dict.fromkeys((f"{by}.Tensor", f"{by}.Scalar"), _compare(by))
    for name in ("bitwise_and.Tensor", "logical_and.default", "__and__.Tensor"):
        steps[name] = _logical(both)
    for name in ("bitwise_or.Tensor", "logical_or.default", "__or__.Tensor"):
        steps[name] = _logical(either)
    for name, by in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("div", "truediv")):
        steps |= dict.fromkeys((f"{name}.Tensor", f"{name}.Scalar"), _arithmetic(by))
    return {f"aten.{name}": step for name, step in steps.items()}


_STEPS = _table()
