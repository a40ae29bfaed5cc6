"""What masks that a graph computes are, read from the ops that make them: positions compared, triangles, padding.

    MaskReader(program).value_of(node) -> Value

    Index        integers that count positions: sum of coefficient * position in a dim, plus a constant
    Choice       one number where a condition holds, another elsewhere
    Sum          a Choice plus a tensor (a bias with a causal mask)
    Leaf         any other tensor; which dim of the value each of its dims is

Conditions are trees of `le` (an Index is at most 0), `same` (two views of one tensor of integers are equal: the documents of
query and key), `order` (two views a, b of one tensor of integers and a number: a - b + number <= 0: places in a document),
boolean leaves, and, or, not. Dims count from the right (-1: keys, -2:
queries), so that broadcasting moves none.

Everything is exact: the result of an op that is not understood is a Leaf. Numbers that are not in the graph but in buffers
(nanoGPT's tril) are read from the model, by `Program.table`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from megafx.analysis.tables import Band
from megafx.ir.nodes import argument, aten_ops, op_name
from megafx.ir.program import VAL, Program
from megafx.kernels.attention.masked_softmax import HARD_FILL

# -- values, and what ops do to them


class Index(NamedTuple):
    """sum of c * position in dim d, over (d, c) of `terms`, plus `constant`."""

    terms: tuple[tuple[int, int], ...]
    constant: int

    def plus(self, other: Index, sign: int = 1) -> Index:
        terms = dict(self.terms)
        for d, c in other.terms:
            terms[d] = terms.get(d, 0) + sign * c
        left = tuple(sorted((d, c) for d, c in terms.items() if c))
        return Index(left, self.constant + sign * other.constant)

    def times(self, factor: int) -> Index:
        return Index(tuple((d, c * factor) for d, c in self.terms if factor), self.constant * factor)


class Leaf(NamedTuple):
    """A tensor. dims: for each of its dims the dim of the value, or None where it has length 1."""

    node: fx.Node
    dims: tuple[int | None, ...]


class Cond(NamedTuple):
    """kind: 'true', 'le' (of an Index), 'same' and 'order' (of two Leafs), 'leaf', 'not', 'and', 'or'."""

    kind: str
    of: tuple[Any, ...] = ()


class Choice(NamedTuple):
    """`on` where the condition holds, else `off`. A boolean tensor is Choice(c, True, False).

    mixed: elsewhere there are several numbers that hide, `off` among them. A row of them alone is not uniform.
    """

    where: Cond
    on: Any
    off: Any
    mixed: bool = False


class Sum(NamedTuple):
    """A mask plus tensors: `mask.on` is 0. replaced: the mask's number is in the place of the tensors where it hides."""

    mask: Choice
    rest: tuple[Leaf, ...]
    replaced: bool = False


Value = Index | Choice | Sum | Leaf
TRUE = Cond("true")


def negated(c: Cond) -> Cond:
    if c.kind == "not":
        return c.of[0]
    if c.kind == "le":  # not (x <= 0) is 1 - x <= 0 for integers
        return Cond("le", (Index((), 1).plus(c.of[0], -1),))
    if c.kind == "order":
        return Cond("order", (c.of[1], c.of[0], 1 - c.of[2]))
    return Cond("not", (c,))


def both(a: Cond, b: Cond) -> Cond:
    if a in (TRUE, b):
        return b
    return a if b == TRUE else Cond("and", (a, b))


def either(a: Cond, b: Cond) -> Cond:
    return TRUE if TRUE in (a, b) else a if a == b else Cond("or", (a, b))


def at_most_zero(x: Index) -> Cond:
    """Positions are not negative: some comparisons always hold."""
    if all(c < 0 for _, c in x.terms) and x.constant <= 0:
        return TRUE
    if not x.terms:
        return Cond("not", (TRUE,))
    return Cond("le", (x,))


def conjuncts(c: Cond, positive: bool = True) -> list[Cond] | None:
    """The conditions that all have to hold; None where there is an 'or' among them."""
    if c == TRUE:
        return [] if positive else None
    if c.kind == "not":
        return conjuncts(c.of[0], not positive)
    if c.kind == ("and" if positive else "or"):
        parts: list[Any] = [conjuncts(part, positive) for part in c.of]
        return None if None in parts else [x for part in parts for x in part]
    if c.kind in ("and", "or"):
        return None
    return [c if positive else negated(c)]


def number_of(value: Value | None) -> Any:
    """The number that all elements are, or None."""
    return value.on if isinstance(value, Choice) and value.where == TRUE else None


def index_of(value: Value | None) -> Index | None:
    """Integers as an Index; a constant too."""
    if isinstance(value, Index):
        return value
    number = number_of(value)
    whole = isinstance(number, (int, float)) and not isinstance(number, bool) and number == int(number)
    return Index((), int(number)) if whole else None


def condition_of(value: Value | None) -> Cond | None:
    """A boolean value as a condition."""
    if isinstance(value, Leaf) and value.node.meta[VAL].dtype == torch.bool:
        return Cond("leaf", (value,))
    if isinstance(value, Choice) and isinstance(value.on, bool):
        if value.on == value.off:
            return TRUE if value.on else Cond("not", (TRUE,))
        return value.where if value.on else negated(value.where)
    return None


def truth(c: Cond) -> Choice:
    return Choice(c, True, False)


def chosen(c: Cond, a: Value | None, b: Value | None) -> Value | None:
    """a where c, else b."""
    on, off = number_of(a), number_of(b)
    if on is not None and off is not None:
        return Choice(c, on, off)
    if off is None:
        return chosen(negated(c), b, a) if on is not None else None
    if isinstance(a, Choice) and (a.off == off or (hides(a.off) and hides(off) and a.on == 0)):
        return Choice(both(c, a.where), a.on, off, a.mixed or a.off != off)
    if isinstance(a, Leaf) and hides(off) and a.node.meta[VAL].is_floating_point():
        return Sum(Choice(c, 0.0, off), (a,), True)
    if isinstance(a, Sum) and hides(off):
        mixed = a.mask.mixed or (a.mask.where != TRUE and a.mask.off != off)
        return Sum(Choice(both(c, a.mask.where), 0.0, off, mixed), a.rest, True)
    return None


def hides(number: Any) -> bool:
    """True if a key with this number in an additive mask has no weight beside keys that are seen."""
    return isinstance(number, (int, float)) and number <= HARD_FILL


def combined(op: Callable[[Any, Any], Any], by: str, a: Value | None, b: Value | None) -> Value | None:
    """Arithmetic on choices: with a number; of two masks; of a mask and a tensor."""
    on, off = number_of(a), number_of(b)
    if isinstance(a, Choice) and off is not None:
        return _checked(a, lambda number: op(number, off))
    if isinstance(b, Choice) and on is not None:
        return _checked(b, lambda number: op(on, number))
    if isinstance(a, Choice) and isinstance(b, Choice):
        if by == "mul" and a.off == 0 and b.off == 0:
            return Choice(both(a.where, b.where), a.on * b.on, 0)
        a, b = _mask_form(a), _mask_form(b)
        if by == "add" and a is not None and b is not None:
            return _both_added(a, b)
        return None
    if by != "add":
        return None

    def as_sum(value: Value | None) -> Sum | None:
        if isinstance(value, Leaf):
            return Sum(Choice(TRUE, 0.0, -math.inf), (value,)) if value.node.meta[VAL].is_floating_point() else None
        form = _mask_form(value) if isinstance(value, Choice) else None
        return Sum(form, ()) if form is not None else value if isinstance(value, Sum) else None

    x, y = as_sum(a), as_sum(b)
    if x is None or y is None or (isinstance(a, Leaf) and isinstance(b, Leaf)):
        return None
    return Sum(_both_added(x.mask, y.mask), (*x.rest, *y.rest), x.replaced or y.replaced)


def _both_added(a: Choice, b: Choice) -> Choice:
    """The sum of two masks. Where both hide there is another number than where one does, unless it is -inf."""
    if TRUE in (a.where, b.where):
        return b if a.where == TRUE else a
    mixed = a.mixed or b.mixed or not a.off == b.off == -math.inf
    return Choice(both(a.where, b.where), 0.0, min(a.off, b.off), mixed)


def _checked(choice: Choice, change: Callable[[Any], Any]) -> Choice | None:
    """The choice with both numbers changed; None where that cannot be computed."""
    try:
        return Choice(choice.where, change(choice.on), change(choice.off), choice.mixed)
    except (ArithmeticError, TypeError):
        return None


def _mask_form(value: Choice) -> Choice | None:
    """An additive mask: 0 where it shows, a number that hides elsewhere."""
    if value.on == 0 and hides(value.off):
        return value
    # never mixed
    return Choice(negated(value.where), value.off, value.on) if value.off == 0 and hides(value.on) else None


def moved(value: Value | None, to: Callable[[int], int | None], shift: Mapping[int, int] | None = None) -> Value | None:
    """The value with its dims renamed, and positions counted from `shift` on. None where a dim that matters is gone.

    A floating tensor (a bias) is taken as it is after the view.
    """
    if isinstance(value, Leaf) and value.node.meta[VAL].is_floating_point():
        return None
    try:
        return _rename(value, to, shift or {})
    except KeyError:
        return None


def _rename(value: Any, to: Callable[[int], int | None], shift: Mapping[int, int]) -> Any:
    if isinstance(value, Index):
        terms = [(to(d), c) for d, c in value.terms]
        if any(d is None for d, _ in terms):
            raise KeyError(value)
        constant = value.constant + sum(c * shift.get(d, 0) for d, c in value.terms)
        return Index(tuple(sorted(terms)), constant)  # type: ignore[arg-type]  # no None: asked above
    if isinstance(value, Leaf):
        dims = tuple(None if d is None else to(d) for d in value.dims)
        if any(d is not None and (n is None or shift.get(d)) for d, n in zip(value.dims, dims, strict=True)):
            raise KeyError(value)
        return Leaf(value.node, dims)
    if isinstance(value, (Cond, Choice, Sum)):
        parts = [_rename(p, to, shift) for p in (value.of if isinstance(value, Cond) else value)]
        return Cond(value.kind, tuple(parts)) if isinstance(value, Cond) else type(value)(*parts)
    return tuple(_rename(p, to, shift) for p in value) if isinstance(value, tuple) else value


def cut(value: Any, dim: int) -> bool:
    """True if a slice along the dim would take a part of a tensor."""
    if isinstance(value, Leaf):
        return dim in value.dims
    if isinstance(value, (Cond, Choice, Sum)):
        return any(cut(p, dim) for p in (value.of if isinstance(value, Cond) else value))
    return isinstance(value, tuple) and not isinstance(value, Index) and any(cut(p, dim) for p in value)


# -- reading a graph


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


@_reads("zeros new_zeros zeros_like ones new_ones ones_like full new_full full_like scalar_tensor")
def _filled(reader: MaskReader, node: fx.Node) -> Value | None:
    name = op_name(node)
    value = {"zeros": 0, "ones": 1}.get(name.removeprefix("new_").removesuffix("_like"))
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
    if isinstance(value, Leaf) and dtype.is_floating_point and (shown := condition_of(value)) is not None:
        value = truth(shown)
    if isinstance(value, Choice):
        kind: Any = bool if dtype == torch.bool else float if dtype.is_floating_point else int
        try:
            return Choice(value.where, kind(value.on), kind(value.off), value.mixed)
        except (ValueError, OverflowError):
            return None
    whole = not (dtype.is_floating_point or dtype == torch.bool)
    same = isinstance(value, Leaf) and value.node.meta[VAL].dtype == dtype
    return value if same or (isinstance(value, Index) and whole) else None


@_reads("detach")
def _detach(reader: MaskReader, node: fx.Node) -> Value | None:
    """Positions and choices have no gradient. What has a floating tensor in it would get one: the result stays a Leaf."""
    value = reader.operand(node.args[0])
    return value if isinstance(value, (Index, Choice)) else None


@_reads(
    "le.Tensor le.Scalar lt.Tensor lt.Scalar ge.Tensor ge.Scalar gt.Tensor gt.Scalar eq.Tensor eq.Scalar ne.Tensor ne.Scalar"
)
def _compare(reader: MaskReader, node: fx.Node) -> Value | None:
    by, a, b = op_name(node), reader.operand(node.args[0]), reader.operand(node.args[1])
    number = number_of(b)
    if isinstance(a, Choice) and a.mixed:
        return None
    if isinstance(a, Choice) and number is not None:
        on, off = (getattr(operator, by)(x, number) for x in (a.on, a.off))
        return truth(a.where if on else negated(a.where)) if on != off else Choice(TRUE, on, on)
    if by in ("eq", "ne") and isinstance(a, Leaf) and isinstance(b, Leaf) and a.node is b.node and a.dims != b.dims:
        equal = Cond("same", (a, b))
        return None if a.node.meta[VAL].is_floating_point() else truth(equal if by == "eq" else negated(equal))
    x, y = index_of(a), index_of(b)
    if x is None or y is None:
        return _order(reader, node, by)
    less, one = x.plus(y, -1), Index((), 1)
    wanted = {"le": less, "lt": less.plus(one), "ge": less.times(-1), "gt": less.times(-1).plus(one)}
    return truth(at_most_zero(wanted[by])) if by in wanted else None


def _order(reader: MaskReader, node: fx.Node, by: str) -> Value | None:
    """Two views of one tensor of integers, each plus a number, compared."""
    x, y = (_counted(reader, operand) for operand in node.args[:2])
    if x is None or y is None or x[0].node is not y[0].node or x[0].dims == y[0].dims:
        return None
    x, y, strict = (y, x, by == "gt") if by in ("ge", "gt") else (x, y, by == "lt")
    return truth(Cond("order", (x[0], y[0], x[1] - y[1] + strict))) if by in ("le", "lt", "ge", "gt") else None


def _counted(reader: MaskReader, node: Any) -> tuple[Leaf, int] | None:
    """A view of a tensor of integers, plus a number."""
    number = 0
    while isinstance(node, fx.Node) and op_name(node) in ("add", "sub") and argument(node, "alpha", 1) == 1:
        more = number_of(reader.operand(node.args[1]))
        if not isinstance(more, int) or isinstance(more, bool):
            return None
        number += more if op_name(node) == "add" else -more
        node = node.args[0]
    leaf = reader.operand(node)
    dtype = leaf.node.meta[VAL].dtype if isinstance(leaf, Leaf) else torch.bool
    whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return (leaf, number) if isinstance(leaf, Leaf) and whole else None


def counts_runs(reader: MaskReader, node: fx.Node, places: fx.Node) -> bool:
    """True if `node` counts where `places` [b, s] do not go on by one, as transformers finds packed sequences.

    cumsum(diff(places, prepend=..) != 1): between two tokens of equal count places differ as positions do.
    """

    def made(value: Any, name: str) -> bool:
        return isinstance(value, fx.Node) and value.op == "call_function" and op_name(value) == name

    def last(value: fx.Node, dim: Any) -> bool:
        return isinstance(dim, int) and dim % value.meta[VAL].dim() == value.meta[VAL].dim() - 1

    if not made(node, "cumsum") or not last(node, node.args[1]):
        return False
    breaks = node.args[0]
    if not made(breaks, "ne") or number_of(reader.operand(breaks.args[1])) != 1 or not made(breaks.args[0], "diff"):
        return False
    steps: fx.Node = breaks.args[0]
    leaf, sizes = reader.operand(steps.args[0]), reader.program.sizes
    return (
        isinstance(leaf, Leaf)
        and leaf.node is places
        and argument(steps, "n") == 1
        and last(steps, argument(steps, "dim"))
        and argument(steps, "append") is None
        and sizes.shape(steps.meta[VAL]) == sizes.shape(steps.args[0].meta[VAL])
    )


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
    to: Callable[[int], int | None] = lambda d: d  # expand
    if name == "unsqueeze":
        at = int(node.args[1]) % n - n
        to = lambda d: d if d > at else d - 1
    elif name == "transpose":
        a, b = (int(x) % n - n for x in node.args[1:3])
        to = lambda d: b if d == a else a if d == b else d
    elif name == "permute":
        order = [int(x) % n - n for x in node.args[1]]
        to = lambda d: order.index(d) - n
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
    """One place of a dim that the value does not depend on."""
    n = node.meta[VAL].dim() + 1
    dim = int(node.args[1]) % n - n
    return moved(reader.operand(node.args[0]), lambda d: None if d == dim else d if d > dim else d + 1)


@_reads("reshape view")
def _reshape(reader: MaskReader, node: fx.Node) -> Value | None:
    """Dims of length 1 come and go."""
    sizes = reader.program.sizes
    before, after = sizes.shape(node.args[0].meta[VAL]), sizes.shape(node.meta[VAL])
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
    if not isinstance(leaf, Leaf) or leaf.dims != _own_dims(source):
        return None
    sizes, shape = reader.program.sizes, source.meta[VAL].shape
    if len(indices) != len(shape):
        return None
    dims: list[int | None] = []
    for which, size in zip(indices, shape, strict=True):
        position = index_of(reader.operand(which))
        if position is None or len(position.terms) != 1 or position.constant or position.terms[0][1] != 1:
            return None
        dim = position.terms[0][0]
        if sizes.of(node.meta[VAL].shape[dim]) != sizes.of(size):
            return None
        dims.append(dim)
    return Leaf(leaf.node, tuple(dims))
