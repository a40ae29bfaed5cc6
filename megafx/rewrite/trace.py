"""A pattern's `match` as a small canonical graph, traced once a process for each variant, dtypes and number of leading dims.

Letters of sizes are distinct primes while tracing, so that a size in the trace (3 * 1009) shows which product of letters it
is; declared numbers are distinct markers. `Trace.calls` has every node's arguments by schema name, with sizes and numbers
recognised.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx._symbolic_trace import _Patcher
from torch.utils._pytree import tree_structure

from megafx.ir.dump import dtype_text
from megafx.ir.nodes import Draw, argument, argument_places, aten_ops, is_draw
from megafx.ir.program import VAL, Input, Output, Program, ancestors
from megafx.ir.sizes import Sizes
from megafx.meanwhile import meanwhile
from megafx.rewrite.pattern import Pattern, PatternError, TensorSpec, Variant, parameters, specs_of
from megafx.rewrite.record import record

# Ops whose first two operands may be exchanged (`add` where alpha is 1).
COMMUTES = aten_ops(
    "add.Tensor mul.Tensor maximum minimum eq.Tensor ne.Tensor bitwise_and.Tensor bitwise_or.Tensor logical_and logical_or"
)
# Arguments of ATen ops that do not say what is computed.
_IGNORED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "copy"})
_DIMS = frozenset({"dim", "dims", "dim0", "dim1"})


def arguments_of(node: fx.Node) -> list[tuple[str, Any]]:
    """(schema name, value) of the arguments that say what a node computes, in the form in which pattern and graph are compared.

    Defaults are filled in, and dims counted from the front. Device and memory format are left out, and the six arguments of ops
    that draw.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return [(str(i), a) for i, a in enumerate(node.args)] + sorted(node.kwargs.items())
    ignored = _IGNORED if target.namespace == "aten" else Draw._fields if is_draw(target) else ()
    names = [name for name in argument_places(target) if name not in ignored]
    values = [argument(node, name) for name in names]
    return [(name, _from_front(node, v) if name in _DIMS else v) for name, v in zip(names, values, strict=True)]


def _from_front(node: fx.Node, dim: Any) -> Any:
    first = node.args[0] if node.args else None
    like = first if isinstance(first, fx.Node) else node
    value = like.meta.get(VAL)
    rank = value.dim() if isinstance(value, torch.Tensor) else 0
    if isinstance(dim, int) and not isinstance(dim, bool):
        return dim + rank if dim < 0 else dim
    return [_from_front(node, d) for d in dim] if isinstance(dim, (list, tuple)) else dim


_FLOATS, _INTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16), (torch.int64, torch.int32, torch.int16)
DTYPE_OF = {dtype_text(dtype): dtype for dtype in (*_FLOATS, *_INTS, torch.int8, torch.uint8, torch.bool)}


class CanonicalForm(NamedTuple):
    """How graphs of models are spelled, which traces of patterns and new nodes have to be too."""

    program: Callable[[Program], int]
    nodes: Callable[[Program, list[fx.Node]], None]


_form: list[CanonicalForm] = []


def register_canonical_form(form: CanonicalForm) -> None:
    """To be called once, by the pass that makes the form: it lies above this package."""
    _form[:] = [form]


def canonical_form() -> CanonicalForm:
    assert _form, "import megafx.passes.canonicalize.canonicalize first: it registers how graphs are spelled"
    return _form[0]


# Letters while tracing. Larger than any number in a model's code; small enough that six of them multiply within 2**63.
PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097, 1103, 1109)


class TraceSize(NamedTuple):
    """A size in a pattern: coefficient times letters."""

    coefficient: int
    letters: tuple[str, ...]


class TraceNumber(NamedTuple):
    """A number that is captured."""

    name: str


class TraceCall(NamedTuple):
    """A node of a trace. arguments: (schema name, value) of those that are compared."""

    target: Any
    arguments: tuple[tuple[str, Any], ...]
    commutes: bool


@dataclass
class Trace:
    """match of one variant as a graph."""

    pattern: type[Pattern]
    variant: Variant
    dtypes: dict[str, torch.dtype]
    lead: int
    specs: dict[str, TensorSpec]
    graph: fx.Graph
    inputs: dict[fx.Node, str]  # node -> name of a parameter (seeds are parts of drops instead)
    roots: tuple[fx.Node, ...]
    search: tuple[fx.Node, ...]  # the roots, those made of most nodes first; matching starts from the first
    calls: dict[fx.Node, TraceCall]
    drops: tuple[fx.Node, ...]  # the nodes that draw
    markers: dict[str, float]  # what the declared numbers were while tracing
    targets: Counter[Any] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        return len(self.calls)

    @property
    def anchor(self) -> fx.Node:
        return self.search[0]

    def __str__(self) -> str:
        return f"{self.pattern.name}({self.variant})"

    @functools.cached_property
    def key(self) -> Any:
        """Equal for traces that match the same graphs."""
        numbers = {n: i for i, n in enumerate(self.graph.nodes)}

        def plain(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return ("node", numbers[value])
            if isinstance(value, (list, tuple)) and not isinstance(value, (TraceSize, TraceNumber)):
                return tuple(map(plain, value))
            return (type(value).__name__, value)

        calls = tuple((c.target, tuple((k, plain(v)) for k, v in c.arguments)) for c in self.calls.values())
        inputs = tuple((numbers[n], name, str(self.specs.get(name))) for n, name in self.inputs.items())
        roots, dtypes = tuple(numbers[r] for r in self.roots), tuple(sorted(self.dtypes.items(), key=str))
        return (calls, inputs, roots, dtypes, self.lead if any(s.dots for s in self.specs.values()) else 0)


_cache: dict[Any, Trace | None] = {}


def trace_of(pattern: type[Pattern], variant: Variant, dtypes: Mapping[str, torch.dtype], lead: int) -> Trace | None:
    """The trace, made at the first call; None where match cannot compute with these dtypes mixed."""
    key = (pattern, variant, tuple(sorted(dtypes.items())), lead)
    if key not in _cache:
        try:
            _cache[key] = _Tracing(pattern, variant, dict(dtypes), lead).run()
        except PatternError:
            raise
        except Exception as error:
            if len(set(dtypes.values())) < 2:
                which = f" ({variant})" if str(variant) else ""
                text = str(error).strip().split("\n")[0]
                raise PatternError(
                    f"pattern '{pattern.name}'{which}: match cannot be traced: {type(error).__name__}: {text}",
                    fix="run it on tensors of the declared shapes; what depends on data, or on sizes by branching, cannot be a "
                    "pattern",
                ) from error
            _cache[key] = None
    return _cache[key]


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """No autocast or inference mode of the caller's gets into a trace."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


@contextlib.contextmanager
def without_code() -> Iterator[None]:
    """Within, graphs are traced without Python code to run them: a third of the time, and nobody runs a pattern.

    For functions that call no module: torch otherwise gives nn.Module two other methods for each trace, and takes
    milliseconds where the class has a thousand subclasses."""
    with _use_lazy_graph_module(True), meanwhile(_Patcher, patch_method=lambda *_, **__: None):
        yield


_modes: list[Callable[[], FakeTensorMode]] = [lambda: FakeTensorMode(allow_non_fake_inputs=True)]


def register_fake_mode(make: Callable[[], FakeTensorMode]) -> None:
    """To be called once, by the module of a quicker mode: it lies above this package."""
    _modes[:] = [make]


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """One for all traces: by a quicker mode a known op is not run again."""
    return _modes[0]()


class _Tracing:
    """One trace in the making."""

    def __init__(self, pattern: type[Pattern], variant: Variant, dtypes: dict[str, torch.dtype], lead: int) -> None:
        self.pattern, self.variant, self.dtypes, self.lead = pattern, variant, dtypes, lead
        self.chosen = dict(variant.values)
        self.specs = specs_of(pattern, self.chosen)
        self.prime_of: dict[str, int] = {}
        self.marker_of: dict[str, float] = {}

    def run(self) -> Trace:
        mode = _fake_mode()
        names = [n for n in self.specs if n not in self.variant.absent]
        with mode:
            dtypes, values = DTYPE_OF | self.dtypes, {}
            for n, spec in ((n, self.specs[n]) for n in names):
                lead = [f"_{self.lead - i}" for i in range(self.lead)] if spec.dots else []
                shape = [self._prime(letter) for letter in lead]
                shape += [dim.coefficient * math.prod(map(self._prime, dim.letters)) for dim in spec.dims]
                values[n] = torch.empty(shape, dtype=dtypes[spec.dtype])
            seed = torch.empty((), dtype=torch.int64)
        takes = parameters(self.pattern.match)
        inputs = [Input("param" if self.specs[n].param else "user", n) for n in names]
        numbers = {n: self._marker(n, kind) for n, kind in self.pattern.scalars.items() if n in takes}
        extra = {n: v for n, v in self.chosen.items() if n in takes}

        def call(*tensors: torch.Tensor) -> Any:
            given: dict[str, Any] = dict.fromkeys(takes)
            given |= dict(zip(names, tensors, strict=False)) | numbers | extra
            if "drop" in takes:
                given["drop"] = Draw(tensors[len(names)], 0.5, 0)
            return self.pattern.match(**given)

        arguments = list(values.values())
        if "drop" in takes:
            arguments.append(seed)
            inputs.append(Input("seed", "drop"))
        with plain_modes(), without_code(), mode:
            gm = _make_graph_module({}, record(call, arguments), "Pattern")
        output = gm.graph.output_node()
        several = isinstance(output.args[0], (list, tuple))
        output.args = (tuple(output.args[0]) if several else (output.args[0],),)
        results = output.args[0]
        if not results or any(not isinstance(r, fx.Node) for r in results):
            raise PatternError(f"pattern '{self.pattern.name}': match returns something that is no tensor")
        outputs = [Output("user", str(i)) for i in range(len(results))]
        program = Program(gm, inputs, outputs, Sizes(), mode, tree_structure(tuple(range(len(results)))))
        canonical_form().program(program)
        return self._finish(program)

    def _prime(self, letter: str) -> int:
        if letter not in self.prime_of:
            if len(self.prime_of) == len(PRIMES):
                raise PatternError(f"pattern '{self.pattern.name}' has more than {len(PRIMES)} sizes")
            self.prime_of[letter] = PRIMES[len(self.prime_of)]
        return self.prime_of[letter]

    def _marker(self, name: str, kind: type) -> Any:
        if kind is int:
            return self._prime(name)
        self.marker_of[name] = _Marker(0.0507 + 0.0618033988749 * (len(self.marker_of) + 1))
        return self.marker_of[name]

    # -- reading the trace

    def _finish(self, program: Program) -> Trace:
        inputs = {node: spec.name for node, spec in program.input_nodes() if spec.kind != "seed"}
        results = program.results()
        for node, name in inputs.items():
            if not node.users:
                raise PatternError(f"pattern '{self.pattern.name}' ({self.variant}): match does not use '{name}'")
        if any(r.op != "call_function" for r in results):
            raise PatternError(f"pattern '{self.pattern.name}' ({self.variant}): match computes nothing")
        nodes = [n for n in program.graph.nodes if n.op == "call_function"]
        calls = {}
        for node in nodes:
            arguments = {name: self._value(value) for name, value in arguments_of(node)}
            commutes = node.target in COMMUTES and arguments.get("alpha", 1) == 1
            calls[node] = TraceCall(node.target, tuple(arguments.items()), commutes)
        search = tuple(sorted(results, key=lambda r: -len(ancestors([r]))))
        drops, targets = tuple(filter(is_draw, nodes)), Counter(n.target for n in nodes)
        markers = {name: float(marker) for name, marker in self.marker_of.items()}
        declared = (self.pattern, self.variant, self.dtypes, self.lead, self.specs)
        return Trace(*declared, program.graph, inputs, results, search, calls, drops, markers, targets)

    def _value(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(self._value, value))
        if isinstance(value, bool):
            return value
        if isinstance(value, float):
            return next((TraceNumber(n) for n, marker in self.marker_of.items() if marker == value), value)
        if isinstance(value, int):
            rest, letters = value, []
            for letter, prime in self.prime_of.items():
                while rest and rest % prime == 0:
                    rest //= prime
                    letters.append(letter)
            return TraceSize(rest, tuple(letters)) if letters else value
        return value


class _Marker(float):
    """A declared number while tracing. Arithmetic on it would lose it."""

    def _refuse(self, other: Any = None, modulo: None = None) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        raise PatternError(
            "match computes with a declared number before an op takes it",
            fix="write the number where the op takes it, and let make compute (make gets what was found)",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __neg__ = __abs__ = _refuse
