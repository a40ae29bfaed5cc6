"""Whether a graph that was traced at sizes of at least 2 serves calls with sizes of 0 and 1.

Code branches on such sizes (`if x.shape[1] > 1`, `squeeze`), and torch.export takes every dynamic size for at least 2, without
a guard. A size of 1 is served if each decision that the model's code took in the trace is the same at 1 (`CallSpec.decided`).
Otherwise, and for 0, the call is captured once more with these sizes as constants, and the listings of the two graphs are
compared: the first graph serves the call if they are the same, the second if they are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import SymTypes

from megafx.ir.call_spec import OutputLeaf
from megafx.ir.nodes import ASSERTS, aten_ops, writes
from megafx.ir.program import VAL

# Nothing, where the shape stays the same (a slice's step is positive).
_VIEWS = aten_ops("alias expand view reshape squeeze squeeze.dim squeeze.dims slice.Tensor")
_COPIES = aten_ops("contiguous")  # too, where nothing is written in place
_FEW = 1024  # elements of a constant that are compared


@dataclass(frozen=True)
class Line:
    """One node."""

    text: str  # with a %s for each of `slots`: numbers of other lines and sizes
    slots: tuple[int | sympy.Expr, ...]
    shape: tuple[Any, ...] | None = None  # its result's, if that may be its operand's


@dataclass(frozen=True)
class Listing:
    """The nodes of a captured graph as text in which sizes can be put in."""

    lines: tuple[Line, ...]
    shapes: Mapping[int, tuple[Any, ...]]  # of operands of lines that have a shape

    def at(self, sizes: Mapping[sympy.Symbol, int]) -> list[str]:
        """The text for these sizes. Views that give their operand, in its shape, are left out."""
        known: dict[Any, Any] = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        for size in (slot for line in self.lines for slot in line.slots):
            if isinstance(size, sympy.Symbol) and size not in known:  # traces may call one dim differently
                known[size] = sympy.Symbol(f"n{len(known) - len(sizes)}", integer=True, positive=True)
        memo: dict[Any, Any] = {}

        def put(size: Any) -> Any:
            if size not in memo:
                memo[size] = size.xreplace(known) if isinstance(size, sympy.Basic) else sympy.Integer(size)
            return memo[size]

        found: list[str] = []
        number: dict[int, int] = {}  # of a line -> of the line that is left
        for i, line in enumerate(self.lines):
            if line.shape is not None:
                (operand, *_) = line.slots
                if [*map(put, self.shapes[operand])] == [*map(put, line.shape)]:
                    number[i] = number[operand]
                    continue
            number[i] = len(found)
            found.append(line.text % tuple(f"<{number[s]}>" if type(s) is int else put(s) for s in line.slots))
        return found


def listing(
    gm: fx.GraphModule, inputs: Sequence[str], constants: Mapping[str, Any], out_leaves: Sequence[OutputLeaf]
) -> Listing:
    """Of a captured graph. inputs: what its placeholders are; constants: those among them that the trace found."""
    lister = _Lister(inputs, constants, _VIEWS if writes_in_place(gm) else _VIEWS | _COPIES)
    lister.graph(gm)
    results: Any = gm.graph.output_node().args[0]
    lister.add("output", [leaf.value if leaf.index < 0 else results[leaf.index] for leaf in out_leaves])
    return Listing(tuple(lister.lines), lister.shapes)


class _Lister:
    def __init__(self, inputs: Sequence[str], constants: Mapping[str, Any], views: frozenset[Any]) -> None:
        self.inputs, self.constants, self.views = iter(inputs), constants, views
        self.lines: list[Line] = []
        self.shapes: dict[int, tuple[Any, ...]] = {}
        self.number: dict[fx.Node, int] = {}

    def graph(self, gm: fx.GraphModule, inner: bool = False) -> None:
        read = _read(gm)
        for node in gm.graph.nodes:
            if node not in read:
                continue
            value = node.meta.get(VAL)
            if isinstance(value, SymTypes) or node.target in ASSERTS:
                continue  # a size: written where it is used
            if node.op == "output":
                if inner:
                    self.add("return", node.args)
                continue
            if node.op == "placeholder":
                self._placeholder(node, value, inner)
            elif node.op == "get_attr":
                held = getattr(gm, str(node.target), None)
                if isinstance(held, fx.GraphModule):
                    self.add("graph", ())
                    self.number[node] = len(self.lines) - 1
                    self.graph(held, inner=True)
                    continue
                self.add(f"attribute {_constant(held)}", ())
            else:
                self._call(node, value)
            self.number[node] = len(self.lines) - 1

    def _placeholder(self, node: fx.Node, value: Any, inner: bool) -> None:
        name = "" if inner else next(self.inputs)
        shape = _shape(value)
        self.add(f"input {name} {_constant(self.constants.get(name))} {getattr(value, 'dtype', None)} ", shape)

    def _call(self, node: fx.Node, value: Any) -> None:
        before = node.args[0] if node.args else None
        operand = before.meta.get(VAL) if isinstance(before, fx.Node) else None
        shape = None
        viewed = node.target in self.views and isinstance(operand, torch.Tensor) and isinstance(value, torch.Tensor)
        if viewed and isinstance(before, fx.Node):
            self.shapes[self.number[before]] = _shape(operand)
            shape = _shape(value)
        self.add(f"{node.target} ", (node.args, node.kwargs), shape)

    def add(self, what: str, value: Any, shape: tuple[Any, ...] | None = None) -> None:
        slots: list[int | sympy.Expr] = []
        text = what.replace("%", "%%") + "".join(self._written(value, slots))
        self.lines.append(Line(text, tuple(slots), shape))

    def _written(self, value: Any, slots: list[int | sympy.Expr]) -> Iterator[str]:
        if isinstance(value, fx.Node):
            size = value.meta.get(VAL)
            slots.append(size.node.expr if isinstance(size, SymTypes) else self.number[value])
            yield "%s"
        elif isinstance(value, SymTypes):
            slots.append(value.node.expr)
            yield "%s"
        elif isinstance(value, sympy.Basic):
            slots.append(value)
            yield "%s"
        elif isinstance(value, (tuple, list)):
            yield "("
            for each in value:
                yield from self._written(each, slots)
                yield ","
            yield ")"
        elif isinstance(value, dict):
            yield from self._written(sorted(value.items()), slots)
        else:
            yield repr(value).replace("%", "%%")


def _read(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes that results depend on, and those that may have effects."""
    found: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        calls_body = node.op == "call_function" and not hasattr(node.target, "_schema")
        if node in found or node.op == "placeholder" or node.is_impure() or calls_body or writes(node):
            found.update((node, *node.all_input_nodes))
    return found


def writes_in_place(gm: fx.GraphModule) -> bool:
    """True if a captured graph writes into memory, in a nested body too."""
    return any(writes(n) for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes)


def _shape(value: Any) -> tuple[Any, ...]:
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in sizes)


def _constant(value: Any) -> str:
    """What of a constant that a trace found is compared: its values, where they are few."""
    if type(value) is torch.Tensor and value.numel() <= _FEW and not value.is_meta:
        return str(value.tolist())
    return "" if value is None else f"{type(value).__name__} {id(value)}"
