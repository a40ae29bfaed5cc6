"""Programs and records as JSON, and back: what a call was compiled to, kept for the next start.

The format is closed. A value is a number, a text, a container, one of the classes that the caller lists, a size, an op of the
namespaces in `_NAMESPACES` or a function in `_FUNCTIONS`; nothing in a file names code to import or to call. What has no such
form (eager calls, ops of the user's own) raises `Unstorable`.

Values of nodes are fakes again, in a shape environment of their own in which symbols keep their names and hints.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy import functions

from megafx.errors import SourceLine
from megafx.ir.call_spec import CallSpec, Leaf, OutputLeaf, register_dataclass
from megafx.ir.data_sizes import DataShapeEnv
from megafx.ir.program import (
    FQN,
    LAYER,
    MADE_BY,
    PHASE,
    PLACEMENT,
    RECOMPUTE,
    REGION,
    SOURCE,
    TOKENS,
    VAL,
    Batch,
    Fusion,
    Input,
    Note,
    Output,
    Phase,
    Program,
    Reached,
    Recomputed,
    graph_module,
)
from megafx.ir.sizes import RowCount, Sizes
from megafx.placements.types import Block, Layout, Owned, Placement


class Unstorable(Exception):
    """A program, or the state that it depends on, that has no form as data. The text says what it is."""


RECORDS: tuple[type, ...] = (
    *(SourceLine, Leaf, OutputLeaf, Batch, Fusion, Input, Note, Output, Reached, Recomputed, RowCount),
    *(Block, Layout, Owned, Placement),
)
_KEPT = (VAL, SOURCE, FQN, MADE_BY, PLACEMENT, PHASE, TOKENS, RECOMPUTE, REGION, LAYER)
_SHARED = (SourceLine, Placement, Owned, Layout)  # written once, since many nodes have equal ones
_NAMESPACES = ("aten", "megafx", "prims", "_c10d_functional")
_OPERATORS = "getitem add sub mul truediv floordiv mod pow neg lt le gt ge eq ne and_ or_ not_"
_FUNCTIONS: dict[str, Any] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "sym_ite")
    },
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
}
_NAME_OF = {function: name for name, function in _FUNCTIONS.items()}
_EXPRESSIONS: dict[str, Any] = {
    **{
        name: getattr(sympy, name)
        for name in ("Add", "Mul", "Pow", "Rational", "Float", "Eq", "Ne", "Lt", "Le", "Gt", "Ge")
    },
    **{name: getattr(sympy, name) for name in ("And", "Or", "Not", "floor", "ceiling")},
    **{
        name: value
        for name, value in vars(functions).items()
        if isinstance(value, type) and issubclass(value, sympy.Basic) and value.__module__ == functions.__name__
    },
}
_EXPRESSION_NAMES = {made: name for name, made in _EXPRESSIONS.items()}
_TORCH = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}
_PLAIN_TYPES = {t.__name__: t for t in (type(None), bool, int, float, str, bytes, tuple, list, dict, torch.Tensor)}


class Writer:
    """Values as JSON. device: of this rank, which other ranks read as their own."""

    def __init__(self, classes: Iterable[type], device: torch.device) -> None:
        self.classes = {each: name for name, each in named_classes(classes).items()}
        self.device = device
        self.shared: list[Any] = []
        self._places: dict[Any, int] = {}
        self._nodes: dict[fx.Node, int] = {}
        self.symbols: dict[sympy.Symbol, int] = {}  # with their hints
        self._forms: dict[type, Callable[[Any], Any]] = {
            **dict.fromkeys((type(None), bool, int, str), lambda x: x),
            **dict.fromkeys((tuple, torch.Size), lambda x: ["t", *map(self, x)]),
            **dict.fromkeys((list, fx.immutable_collections.immutable_list), lambda x: ["l", *map(self, x)]),
            **dict.fromkeys((dict, fx.immutable_collections.immutable_dict, MappingProxyType), self._dict),
            **dict.fromkeys((torch.dtype, torch.layout, torch.memory_format), lambda x: ["torch", str(x)]),
            float: lambda x: x if math.isfinite(x) else ["float", repr(x)],
            complex: lambda x: ["complex", x.real, x.imag],
            OrderedDict: lambda x: ["ordered", *(part for k, v in x.items() for part in (self(k), self(v)))],
            set: lambda x: ["set", *map(self, x)],
            frozenset: lambda x: ["frozenset", *map(self, x)],
            slice: lambda x: ["slice", self(x.start), self(x.stop), self(x.step)],
            torch.device: self._device,
            fx.Node: lambda x: ["n", self._nodes[x]],
            FakeTensor: self._fake,
            torch.SymInt: lambda x: ["int", self(x.node.expr)],
            torch.SymFloat: lambda x: ["symfloat", self(x.node.expr)],
            torch.SymBool: lambda x: ["symbool", self(x.node.expr)],
        }

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SHARED or isinstance(value, sympy.Basic):
            place = self._places.get(value)
            if place is None or self.shared[place] is None:
                form = self._expression(value) if isinstance(value, sympy.Basic) else self._record(value)
                place = self._places[value] = len(self.shared)
                self.shared.append(form)
            return ["@", place]
        form = self._forms.get(kind)
        if form is not None:
            return form(value)
        if kind in self.classes:
            return self._record(value)
        if isinstance(value, type):
            return ["class", *self._class(value)]
        if isinstance(value, pytree.TreeSpec):  # a leaf's has a class of its own
            return self._spec(value)
        if isinstance(value, Enum):
            return ["enum", *self._class(kind), value.name]
        raise Unstorable(f"a {kind.__module__}.{kind.__qualname__}")

    def _dict(self, value: Mapping[Any, Any]) -> Any:
        return ["d", *(part for k, v in value.items() for part in (self(k), self(v)))]

    def _record(self, value: Any) -> Any:
        name = self.classes[type(value)]
        return ["r", name, *(self(getattr(value, field)) for field in _fields(type(value)))]

    def _class(self, value: type) -> tuple[str, str]:
        if "<" in value.__qualname__ or named_in(value.__module__, value.__qualname__) is not value:
            raise Unstorable(f"the class {value.__qualname__}, which cannot be found by its name")
        return value.__module__, value.__qualname__

    def _device(self, value: torch.device) -> Any:
        return ["here"] if value == self.device else ["device", value.type, value.index]

    def _expression(self, expr: sympy.Basic) -> Any:
        if isinstance(expr, sympy.Symbol):
            if not expr.name.startswith("s") or not expr.name[1:].isdigit():
                raise Unstorable(f"the size {expr}")
            self.symbols.setdefault(expr, 0)
            return ["symbol", expr.name]
        if expr.is_Integer:
            return ["number", int(expr)]
        if expr in (sympy.true, sympy.false):
            return ["truth", bool(expr)]
        if isinstance(expr, (sympy.Rational, sympy.Float)):
            return ["number", int(expr.p), int(expr.q)] if expr.is_Rational else ["real", repr(float(expr))]
        name = _EXPRESSION_NAMES.get(expr.func)
        if name is None:
            raise Unstorable(f"the size {expr}")
        return ["of", name, *map(self, expr.args)]

    def _fake(self, x: FakeTensor) -> Any:
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            raise Unstorable(f"a value of layout {x.layout}, or a conjugate")
        where = [self(x.dtype), self._device(x.device)]
        return ["f", [*map(self, x.shape)], [*map(self, x.stride())], self(x.storage_offset()), *where]

    def _spec(self, spec: pytree.TreeSpec) -> Any:
        if spec.is_leaf():
            return ["leaf"]
        kind: Any = spec.type
        return ["spec", *self._class(kind), self(spec._context), *map(self, spec.children())]

    # -- graphs

    def graph(self, program: Program) -> Any:
        rows = []
        for number, node in enumerate(program.graph.nodes):
            if node.op not in ("placeholder", "call_function", "output"):
                raise Unstorable(f"a node that is a {node.op} ({node.target})")
            target = node.target if node.op != "call_function" else _target_name(node.target)
            meta = [part for key in _KEPT if key in node.meta for part in (key, self(node.meta[key]))]
            rows.append([node.op, node.name, target, self(node.args), self(node.kwargs), meta])
            self._nodes[node] = number
        return rows

    def program(self, program: Program) -> Any:
        """A LOWERED program, without constants and the state that it depends on."""
        assert program.call is not None and program.partition is None
        call = program.call
        first = program.before_reduction
        if first is not None and (first.sizes is not program.sizes or first.call is not call or first.before_reduction):
            raise Unstorable("a program of two sets of sizes")
        form = {
            "sizes": self.sizes(program.sizes),
            "call": self._call(call),
            "proven": [[sorted(small), self._call(same)] for small, same in call.proven.items()],
            "program": self._parts(program),
            "before": None if first is None else self._parts(first),
        }
        env: Any = program.fake_mode.shape_env
        hints = {str(s): int(env.backed_var_to_val[s]) for s in self.symbols if s in env.backed_var_to_val}
        rows = {name: str(count.node._expr) for name, count in getattr(env, "row_counts", {}).items()}
        return form | {"hints": hints, "rows": {name: symbol for name, symbol in rows.items() if symbol in hints}}

    def _call(self, call: CallSpec) -> Any:
        if call.questions:
            raise Unstorable("forward decides by values of its arguments")
        parts = [call.leaves, call.out_spec, call.out_leaves, dict(call.ranges), call.conditions, call.decided]
        parts += [dict(call.names), dict(call.parts), call.written, call.compared, (), call.listing]
        return [*map(self, parts)]

    def sizes(self, sizes: Sizes) -> Any:
        primes = [[self(expr), prime] for expr, prime in sizes._prime_of.items()]
        named = (sizes.symbols, sizes.workload_of, sizes.traced_of, sizes.row_counts, sizes.of_call)
        return [primes, sizes._last, *map(self, named)]

    def _parts(self, program: Program) -> Any:
        lists = [self(x) for x in (program.inputs, program.outputs, program.out_spec, program.notes, program.fusions)]
        rest = [self(x) for x in (program.assumed, program.batch, program.recomputed, program.reached)]
        return [int(program.phase), self.graph(program), *lists, *rest]


class Reader:
    """What a Writer wrote. shared: its list. Raises for anything that is not in the format."""

    def __init__(self, classes: Iterable[type], device: torch.device, shared: list[Any]) -> None:
        self.classes, self.device, self.shared = named_classes(classes), device, shared
        self._known: dict[int, Any] = {}
        self._nodes: list[fx.Node] = []
        self.symbols: dict[str, sympy.Symbol] = {}
        self.hints: dict[sympy.Symbol, sympy.Integer] = {}
        self._integers: dict[sympy.Expr, torch.SymInt] = {}
        self._likes: dict[str, torch.Tensor] = {}  # text of a form -> a tensor on meta
        self._plans: dict[str, tuple[type, list[str]]] = {n: (c, _fields(c)) for n, c in self.classes.items()}
        self._forms: dict[str, Callable[[Any], Any]] = {
            "@": lambda x: self._shared(x[1]),
            "t": lambda x: tuple([self(part) for part in x[1:]]),
            "l": lambda x: [self(part) for part in x[1:]],
            "d": lambda x: {self(k): self(v) for k, v in zip(x[1::2], x[2::2], strict=True)},
            "ordered": lambda x: OrderedDict((self(k), self(v)) for k, v in zip(x[1::2], x[2::2], strict=True)),
            "set": lambda x: {*map(self, x[1:])},
            "frozenset": lambda x: frozenset(map(self, x[1:])),
            "slice": lambda x: slice(*map(self, x[1:])),
            "torch": lambda x: _TORCH[x[1]],
            "float": lambda x: float(x[1]),
            "complex": lambda x: complex(x[1], x[2]),
            "r": self._record,
            "n": lambda x: self._nodes[x[1]],
            "f": self._fake,
            "int": lambda x: self._integer(self(x[1])),
            "symfloat": lambda x: self.env.create_symfloatnode(self(x[1]), hint=None),
            "symbool": lambda x: self.env.create_symboolnode(self(x[1])),
            "here": lambda x: self.device,
            "device": lambda x: torch.device(x[1], x[2]) if x[2] is not None else torch.device(x[1]),
            "class": lambda x: _allowed(x[1], x[2]),
            "enum": lambda x: _allowed(x[1], x[2])[x[3]],
            "leaf": lambda x: pytree.tree_structure(0),
            "spec": self._spec,
            "symbol": lambda x: self.symbols.get(x[1]) or sympy.Symbol(x[1], integer=True, positive=True),
            "number": lambda x: sympy.Integer(x[1]) if len(x) == 2 else sympy.Rational(x[1], x[2]),
            "real": lambda x: sympy.Float(float(x[1])),
            "truth": lambda x: sympy.true if x[1] else sympy.false,
            "of": lambda x: _EXPRESSIONS[x[1]](*map(self, x[2:])),
        }

    def __call__(self, form: Any) -> Any:
        return self._forms[form[0]](form) if type(form) is list else form

    def _shared(self, place: int) -> Any:
        if place not in self._known:
            self._known[place] = self(self.shared[place])
        return self._known[place]

    def _record(self, form: Any) -> Any:
        made, names = self._plans[form[1]]
        values = [self(part) for part in form[2:]]
        if issubclass(made, tuple):
            return made(*values)
        return made(**dict(zip(names, values, strict=True)))

    def _integer(self, expr: sympy.Expr) -> torch.SymInt:
        if expr not in self._integers:
            hint = int(expr.xreplace(self.hints))
            self._integers[expr] = self.env.create_symintnode(expr, hint=hint)  # type: ignore[assignment]  # no int
        return self._integers[expr]

    def _fake(self, form: Any) -> FakeTensor:
        _, shape, stride, offset, dtype, device = form
        key = str((shape, stride, dtype))
        if key not in self._likes:
            self._likes[key] = torch.empty_strided(
                [*map(self, shape)], [*map(self, stride)], dtype=self(dtype), device="meta"
            )
        x = torch._lazy_clone(self._likes[key])  # in memory of its own, in a tenth of the time
        if offset != 0:
            x = torch.as_strided(x, x.shape, x.stride(), self(offset))
        return FakeTensor(self.fake_mode, x, self(device))

    def _spec(self, form: Any) -> pytree.TreeSpec:
        _, module, name, context, *children = form
        kind = _allowed(module, name)
        if kind not in pytree.SUPPORTED_NODES and is_dataclass(kind):
            register_dataclass(kind)  # type: ignore[arg-type]  # of a class, is_dataclass makes an instance
        return pytree.TreeSpec(kind, self(context), [*map(self, children)])

    # -- graphs

    def graph(self, rows: Any) -> fx.GraphModule:
        graph, nodes = fx.Graph(), self._nodes
        nodes.clear()
        for op, name, target, args, kwargs, meta in rows:
            made = _target_named(target) if op == "call_function" else target
            node = graph.create_node(op, made, name=name)
            node.args, node.kwargs = self(args), self(kwargs)  # create_node looks through those that it is given
            for key, value in zip(meta[::2], meta[1::2], strict=True):
                if key not in _KEPT:
                    raise ValueError(f"'{key}' is no fact of a node")
                node.meta[key] = self(value)
            nodes.append(node)
        graph.lint()
        return graph_module(torch.nn.Module(), graph)

    def program(self, form: Any, in_spec: pytree.TreeSpec) -> Program:
        """in_spec: of the call. Constants, tables and the state that the program depends on are left to the caller."""
        self.env = DataShapeEnv()
        self.fake_mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True, export=True)
        for name, hint in form["hints"].items():
            self.symbols[name] = _symbol(self.env, name, hint)
        self.hints = {s: sympy.Integer(form["hints"][name]) for name, s in self.symbols.items()}
        self.env.row_counts.update({name: self._integer(self.symbols[s]) for name, s in form["rows"].items()})
        self.env.freeze()
        sizes = self.sizes(form["sizes"])
        call = CallSpec(in_spec, *map(self, form["call"]))
        for small, same in form["proven"]:
            call.proven[frozenset((name, size) for name, size in small)] = CallSpec(in_spec, *map(self, same))
        with torch.no_grad(), _disable_current_modes():
            program = self._parts(form["program"], sizes, call)
            if form["before"] is not None:
                program.before_reduction = self._parts(form["before"], sizes, call)
        return program

    def sizes(self, form: Any) -> Sizes:
        sizes = Sizes()
        primes, sizes._last, *named = form
        for expr, prime in primes:
            sizes._prime_of[self(expr)], sizes._atom_of[prime] = prime, self(expr)
        sizes.symbols, sizes.workload_of, sizes.traced_of, sizes.row_counts, sizes.of_call = map(self, named)
        return sizes

    def _parts(self, form: Any, sizes: Sizes, call: CallSpec) -> Program:
        phase, rows, *rest = form
        gm = self.graph(rows)
        inputs, outputs, out_spec, notes, fusions, assumed, batch, recomputed, reached = map(self, rest)
        program = Program(gm, inputs, outputs, sizes, self.fake_mode, out_spec, {}, Phase(phase), notes, fusions)
        return replace(program, assumed=assumed, batch=batch, recomputed=recomputed, reached=reached, call=call)


def named_classes(classes: Iterable[type]) -> dict[str, type]:
    return {f"{c.__module__}.{c.__qualname__}".removeprefix("megafx."): c for c in (*RECORDS, *classes)}


def _fields(kind: type) -> list[str]:
    return [*kind._fields] if issubclass(kind, tuple) else [f.name for f in fields(kind) if f.init]  # type: ignore[attr-defined,arg-type]  # named tuples and dataclasses


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in _NAMESPACES:
            raise Unstorable(f"the op {target}, which is no op of torch or megafx")
        if target is torch.ops.megafx.eager_call.default:
            raise Unstorable("code that is not captured (eager modules, hooks)")
        return str(target)
    if target not in _NAME_OF:
        raise Unstorable(f"a call of {target}")
    return _NAME_OF[target]


def _target_named(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, packet, overload = name.split(".")
    if namespace not in _NAMESPACES:
        raise ValueError(f"'{name}' is no op of a graph")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def named_in(module: str, name: str) -> Any:
    """What a loaded module has under a qualified name; None where there is nothing."""
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _allowed(module: str, name: str) -> Any:
    """A class that structures of calls are made of: a pytree node, a dataclass, an enum, a cache, or a plain type."""
    if module in ("builtins", "torch") and name in _PLAIN_TYPES:
        return _PLAIN_TYPES[name]
    found = named_in(module, name)
    if found is namedtuple or (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        return found
    cache = module.startswith("transformers.") and name.endswith(("Cache", "Layer"))
    if isinstance(found, type) and (
        found in pytree.SUPPORTED_NODES or is_dataclass(found) or issubclass(found, Enum) or cache
    ):
        return found
    raise ValueError(f"{module}.{name} is no class of a call")


def _symbol(env: DataShapeEnv, name: str, hint: int) -> sympy.Symbol:
    """A size of this name and hint."""
    from torch._dynamo.source import ConstantSource  # as in data_sizes.py

    env._generate_unique_id = lambda source: int(name[1:])  # type: ignore[method-assign, assignment]  # it would choose another name
    try:
        symbol: Any = env.create_symbol(hint, ConstantSource(f"stored_{name}"), DimDynamic.DYNAMIC)
    finally:
        del env._generate_unique_id
    return symbol
