"""Structural integers: symbolic sizes as plain integers and back.

The planner and the placement algebra reason about products, divisibility and equality of sizes. Every symbol (or sum of
symbols) that occurs in a graph's sizes is given a prime of its own, larger than any static dim, so `b*s*4096` is an ordinary
integer that factors in one way only. `Sizes` holds the correspondence, prices the workload and emits sizes into graphs.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

FIRST_PRIME = 2**31  # above every static dim that a model may have


@dataclass(frozen=True)
class RowCount:
    """A size that data decides. Priced as an equal share of `among` (structural): a token's choices over the experts."""

    name: str
    among: int
    shares: int


class Sizes:
    """The structural integers of one program. symbols: names ('batch', 'seq') of the symbols that have one; traced_of: what
    they were in the trace."""

    def __init__(self) -> None:
        self._prime_of: dict[sympy.Expr, int] = {}
        self._atom_of: dict[int, sympy.Expr] = {}
        self._memo: dict[sympy.Expr, int] = {}
        self._last = FIRST_PRIME
        self.symbols: dict[str, sympy.Symbol] = {}
        self.workload_of: dict[sympy.Symbol, int] = {}
        self.traced_of: dict[sympy.Symbol, int] = {}
        self.row_counts: dict[sympy.Symbol, RowCount] = {}  # sizes that data decides (data_sizes.py)
        self.of_call: dict[sympy.Symbol, int] = {}  # the sizes of the call that was captured
        self._priced: tuple[dict[sympy.Symbol, int], dict[int, int]] = ({}, {})  # a workload, and sizes at it

    # -- symbolic -> structural

    def of(self, size: int | torch.SymInt) -> int:
        """int | SymInt -> structural integer."""
        return size if isinstance(size, int) else self.of_expr(size.node.expr)

    def shape(self, value: torch.Tensor) -> tuple[int, ...]:
        """Structural shape of a (fake) tensor."""
        return tuple(self.of(n) for n in value.shape)

    def of_expr(self, expr: sympy.Expr) -> int:
        if expr.is_Integer:
            return int(expr)
        if expr not in self._memo:
            self._memo[expr] = self._factor(expr)
        return self._memo[expr]

    def _factor(self, expr: sympy.Expr) -> int:
        product = 1
        factors = _factors(expr)
        difference = next((base for base, power in factors.items() if base.is_Add and power == 1), None)
        if difference is not None and factors.pop(sympy.Integer(-1), None):  # -s0*(u0 - s1): sizes are s0 and s1 - u0
            factors[-difference] = factors.pop(difference)
        for base, power in factors.items():
            if not (power.is_Integer and power > 0) or (base.is_number and not base.is_Integer):
                return self._prime(expr)  # no product of integers: one atom
            product *= (int(base) if base.is_Integer else self._atom(base)) ** int(power)
        return product

    def _atom(self, expr: sympy.Expr) -> int:
        """A quotient that comes out even, which torch's FloorDiv leaves as (s**2)//s; else a prime."""
        if isinstance(expr, FloorDiv):
            whole, by = map(self.of_expr, expr.args)
            if by > 0 and whole % by == 0:
                return whole // by
        return self._prime(expr)

    def _prime(self, atom: sympy.Expr) -> int:
        if atom not in self._prime_of:
            self._last = int(sympy.nextprime(self._last + 1000))
            self._prime_of[atom], self._atom_of[self._last] = self._last, atom
        return self._prime_of[atom]

    # -- structural -> symbolic

    def factors(self, structural: int) -> tuple[int, dict[sympy.Expr, int]]:
        """(static coefficient, {atom: power})."""
        powers: dict[sympy.Expr, int] = {}
        if abs(structural) >= FIRST_PRIME:
            for prime, atom in self._atom_of.items():
                while structural % prime == 0:
                    structural //= prime
                    powers[atom] = powers.get(atom, 0) + 1
        return structural, powers

    def expr(self, structural: int) -> sympy.Expr:
        coefficient, powers = self.factors(structural)
        return sympy.Mul(sympy.Integer(coefficient), *(a**p for a, p in powers.items()))

    def is_static(self, structural: int) -> bool:
        return not self.factors(structural)[1]

    def mentions(self, structural: int, name: str) -> bool:
        """True if the named symbol ('batch', 'seq') is in this size."""
        symbol = self.symbols.get(name)
        return symbol is not None and any(symbol in a.free_symbols for a in self.factors(structural)[1])

    def is_one_of(self, structural: int, names: Iterable[str]) -> bool:
        """True if this is one of the named symbols, or follows from one alone (s - 1, 2 * s)."""
        powers = self.factors(structural)[1]
        wanted = {self.symbols[name] for name in names if name in self.symbols}
        return [*powers.values()] == [1] and any(a.free_symbols <= wanted for a in powers)

    def from_data(self, structural: int) -> bool:
        """True if data decides this size."""
        if not self.row_counts or structural < FIRST_PRIME:
            return False
        return any(not self.row_counts.keys().isdisjoint(a.free_symbols) for a in self.factors(structural)[1])

    def shards_to_one(self, structural: int, t: int) -> bool:
        """True if the traced size is symbolic, and ranks hold at most one element of it: torch specialises such a size.

        A sequence is traced so short where a table of the model bounds it (capture/dims.py).
        """
        coefficient, powers = self.factors(structural)
        if not powers or not all(self.traced_of.keys() >= atom.free_symbols for atom in powers):
            return False
        return math.prod([int(a.xreplace(self.traced_of)) ** p for a, p in powers.items()], start=coefficient) <= t

    def workload(self, structural: int) -> int:
        """The size at the workload that the planner prices (`micro_batch_size`, `seq_length`, else the traced hint)."""
        if self._priced[0] != self.workload_of:
            self._priced = (dict(self.workload_of), {})
        known = self._priced[1]
        if structural not in known:
            known[structural] = self._workload(structural)
        return known[structural]

    def numel(self, value: torch.Tensor) -> int:
        """Elements of a tensor at the workload."""
        return self.workload(math.prod(self.shape(value)))

    def bytes(self, value: Any) -> int:
        """Bytes of a tensor at the workload; 0 for anything else."""
        return self.numel(value) * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0

    def _workload(self, structural: int) -> int:
        coefficient, powers = self.factors(structural)
        for atom, power in powers.items():
            known = {s: sympy.Integer(v) for s, v in self.workload_of.items()}
            for symbol in atom.free_symbols & self.row_counts.keys():
                count = self.row_counts[symbol]
                known[symbol] = sympy.Integer(-(-self.workload(count.among) // count.shares))
            coefficient *= int(atom.xreplace(known)) ** power
        return coefficient

    @contextlib.contextmanager
    def at_call(self) -> Iterator[None]:
        """Within, the workload is the call that was captured."""
        before = dict(self.workload_of)
        self.workload_of.update(self.of_call)
        try:
            yield
        finally:
            self.workload_of.clear()
            self.workload_of.update(before)

    def text(self, structural: int) -> str:
        """For people: symbols by the names that they have."""
        named = {symbol: sympy.Symbol(name) for name, symbol in self.symbols.items()}
        return str(self.expr(structural).xreplace(named)).replace(" ", "")


def _factors(expr: sympy.Expr) -> dict[sympy.Expr, sympy.Expr]:
    """Factor -> power. A sum of multiples of symbols has none but a number, which `factor` does not see at once: it takes
    seconds for the rows of 64 experts."""
    if expr.is_Add and all(x.is_Symbol or x.is_Integer for arg in expr.args for x in arg.as_coeff_Mul()):
        number, rest = expr.primitive()
        return {number: sympy.Integer(1), rest: sympy.Integer(1)}
    return dict(sympy.factor(expr).as_powers_dict())


def symbol_sources(graph: fx.Graph) -> dict[sympy.Symbol, tuple[fx.Node, int]]:
    """For each free symbol the first placeholder dim whose size it is."""
    sources: dict[sympy.Symbol, tuple[fx.Node, int]] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            sources.setdefault(value.node.expr, (node, -1))
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    sources.setdefault(size.node.expr, (node, dim))
    return sources


# Ops whose result has a size that data decides, which its second argument names.
COUNTING = ("rows", "length", "repeats", "received_rows", "tokens_sent")
EAGER = "eager_call"  # some sizes of its results may be such, too


def _calls(graph: fx.Graph, *names: str) -> list[fx.Node]:
    """The nodes of megafx's ops of these names, in graph order."""
    ops = [getattr(torch.ops.megafx, name).default for name in names if hasattr(torch.ops.megafx, name)]
    return sorted(node for op in ops for node in graph.find_nodes(op="call_function", target=op))


def row_sources(graph: fx.Graph) -> dict[sympy.Symbol, tuple[fx.Node, int]]:
    """For each symbol of a size that data decides (data_sizes.py) the first node whose result is so long."""
    found: dict[sympy.Symbol, tuple[fx.Node, int]] = {}
    results = [user for node in _calls(graph, EAGER) for user in node.users if user.target is operator.getitem]
    for node in sorted([*_calls(graph, *COUNTING), *results]):
        if node.target is not operator.getitem:
            named = getattr(node.meta["val"].fake_mode.shape_env, "row_counts", {})
            if node.args[1] in named:
                found.setdefault(named[node.args[1]].node._expr, (node, 0))
        else:
            value: Any = node.meta["val"]
            env = getattr(getattr(value, "fake_mode", None), "shape_env", None)
            symbols = {count.node._expr for count in getattr(env, "row_counts", {}).values()}
            for dim, size in enumerate(value.shape if symbols else ()):
                if isinstance(size, torch.SymInt) and size.node._expr in symbols:
                    found.setdefault(size.node._expr, (node, dim))
    return found


def size_sources(graph: fx.Graph) -> dict[sympy.Symbol, tuple[fx.Node, int]]:
    """The dims that sizes are computed from: of placeholders, and of what counts."""
    return {**symbol_sources(graph), **row_sources(graph)}


def is_size(node: fx.Node) -> bool:
    """True if the node's value is a number, such as the size of a dim."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt, torch.SymFloat))


class SizeEmitter:
    """Emits structural sizes as nodes, each once: at the top of one graph, rooted on its placeholders; those that data
    decides right behind the node (`megafx.rows`) that they are sizes of."""

    def __init__(self, graph: fx.Graph, sizes: Sizes) -> None:
        self.graph, self.sizes = graph, sizes
        self._nodes: dict[Any, fx.Node] = {}
        rows = row_sources(graph)
        self._sources = {**symbol_sources(graph), **rows}  # a tangent has such a size, too
        self._late = {node for node, _ in rows.values()}  # rows, and the sizes that stem from them
        self.anchor = next(n for n in graph.nodes if n.op != "placeholder" and not is_size(n))
        for node in graph.nodes:  # sizes that an earlier pass emitted
            if node is self.anchor:
                break
            if node.op != "placeholder":
                self._nodes.setdefault(node.meta["val"].node.expr, node)
        for node in graph.nodes if rows else ():
            if is_size(node) and self._late.intersection(node.all_input_nodes) and self._follows_rows(node):
                self._late.add(node)
                self._nodes.setdefault(node.meta["val"].node._expr, node)

    def _follows_rows(self, node: fx.Node) -> bool:
        """True if only sizes are between it and the rows that it is computed from: others may be used before it."""
        before = node.prev
        while is_size(before):
            before = before.prev
        return before in self._late

    def __call__(self, structural: int) -> int | fx.Node:
        """structural integer -> int, or the node that computes it."""
        if self.sizes.is_static(structural):
            return structural
        return self._expr(self.sizes.expr(structural))

    def ceil_div(self, structural: int, t: int) -> int | fx.Node:
        """ceil(structural / t), as an int or a node."""
        if self.sizes.is_static(structural):
            return -(-structural // t)
        size = self._expr(self.sizes.expr(structural))
        value = size.meta["val"]
        up = self._call(("+", size, t - 1), operator.add, (size, t - 1), value + (t - 1))
        return self._call(("//", up, t), operator.floordiv, (up, t), up.meta["val"] // t)

    def mul(self, a: int | fx.Node, b: int | fx.Node) -> int | fx.Node:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if a == 1 or b == 1:
            return b if a == 1 else a
        va, vb = (x.meta["val"] if isinstance(x, fx.Node) else x for x in (a, b))
        return self._call(("*", a, b), operator.mul, (a, b), va * vb)

    def add(self, a: int | fx.Node, b: int | fx.Node) -> int | fx.Node:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        va, vb = (x.meta["val"] if isinstance(x, fx.Node) else x for x in (a, b))
        return self._call(("+", a, b), operator.add, (a, b), va + vb)

    def local_size(self, layout: Any, t: int) -> int | fx.Node:
        """Emitted `layout.local_size(t)`."""
        total: int | fx.Node = 0
        chunks = layout.chunks(t)
        for count, unit in layout.blocks:
            part = self.mul(self.mul(self.ceil_div(count, chunks), chunks // t), self(unit))
            total = part if total == 0 else self.add(total, part)
        return self.mul(self(layout.rep), total)

    def _call(self, key: Any, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        if key not in self._nodes:
            if self.anchor._erased:
                self.anchor = next(n for n in self.graph.nodes if n.op != "placeholder" and not is_size(n))
            late = [a for a in args if isinstance(a, fx.Node) and a in self._late]
            with self.graph.inserting_after(max(late)) if late else self.graph.inserting_before(self.anchor):
                node = self.graph.call_function(target, args)
            if late:
                self._late.add(node)
            node.meta["val"] = value
            self._nodes[key] = node
        return self._nodes[key]

    def _expr(self, expr: sympy.Expr) -> fx.Node:
        if expr in self._nodes:
            return self._nodes[expr]
        if isinstance(expr, sympy.Symbol):
            if expr not in self._sources:
                raise KeyError(f"size symbol {expr} is the size of no input and of no rows")
            source, dim = self._sources[expr]
            if dim < 0:
                self._nodes[expr] = source
                return source
            value = source.meta["val"].shape[dim]
            return self._call(expr, torch.ops.aten.sym_size.int, (source, dim), value)
        env = {s: _Emit(self, self._expr(s)) for s in sorted(expr.free_symbols, key=str)}
        node = sympy_interp(_EmitAnalysis, env, expr).node
        self._nodes[expr] = node
        return node


class _Emit:
    """An operand of `sympy_interp` that writes each arithmetic step into the graph."""

    def __init__(self, emitter: SizeEmitter, node: fx.Node) -> None:
        self.emitter, self.node = emitter, node

    def _binary(self, target: Any, a: Any, b: Any) -> _Emit:
        a, b = (x.node if isinstance(x, _Emit) else x if isinstance(x, float) else int(x) for x in (a, b))
        va, vb = (x.meta["val"] if isinstance(x, fx.Node) else x for x in (a, b))
        # -1 * x is -1.0*x, another expression than the -x of y - x
        if target is operator.mul and va == -1 and isinstance(vb, torch.SymFloat):
            return _Emit(self.emitter, b).unary(operator.neg)
        return _Emit(self.emitter, self.emitter._call((target, a, b), target, (a, b), target(va, vb)))

    def unary(self, target: Any) -> _Emit:
        value = target(self.node.meta["val"])
        return _Emit(self.emitter, self.emitter._call((target, self.node), target, (self.node,), value))


class _EmitAnalysis(PythonReferenceAnalysis):
    """Emits calls for what has no operator: Max, Min, and the roundings of ranges with a step (arange(n, -n, -1.5))."""

    @staticmethod
    def to_dtype(x: Any, dtype: torch.dtype) -> Any:
        return x.unary(torch.sym_float) if isinstance(x, _Emit) else PythonReferenceAnalysis.to_dtype(x, dtype)

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def ceil_to_int(x: Any, dtype: torch.dtype) -> Any:
        return x.unary(math.ceil) if isinstance(x, _Emit) else math.ceil(x)

    @staticmethod
    def floor_to_int(x: Any, dtype: torch.dtype) -> Any:
        return x.unary(math.floor) if isinstance(x, _Emit) else math.floor(x)

    @staticmethod
    def round_to_int(x: Any, dtype: torch.dtype) -> Any:
        return x.unary(round) if isinstance(x, _Emit) else round(x)

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        return x.unary(math.trunc) if isinstance(x, _Emit) else math.trunc(x)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return a._binary(torch.sym_max, a, b) if isinstance(a, _Emit) else b._binary(torch.sym_max, a, b)

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return a._binary(torch.sym_min, a, b) if isinstance(a, _Emit) else b._binary(torch.sym_min, a, b)


def _install(name: str) -> None:
    target = getattr(operator, name)
    setattr(_Emit, f"__{name}__", lambda a, b: a._binary(target, a, b))
    setattr(_Emit, f"__r{name}__", lambda a, b: a._binary(target, b, a))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _install(_name)
